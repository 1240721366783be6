"""One run on many devices: the sharded strategy, where every weight lies, and decoding that cannot deadlock."""
