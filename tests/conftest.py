import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch

torch.set_num_threads(1)  # tiny models: more threads only wait for each other
