"""Matrix products on a CPU from a second copy of the weights, in the layout oneDNN reads fastest.

Windows of 4 .. 16 rows are what drafting and verifying multiply all day, and just there the ordinary kernels are
poorest: reading the weights once is the limit, and they take several times that. In bfloat16 there is more to be had:
packed for a single row, a row's result does not depend on the rows beside it, to the bit. A target read that way gives
the same text at every window width and batch size, by construction and not by luck with near ties.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Rows for which a layout is chosen, and between which it is used. In float32 one or two rows are vector products, which
# the ordinary kernel reads as fast as memory gives, and many rows are no matter of memory. In bfloat16 every product
# goes this way, in pieces small enough for one blocking of the inner dimension: that is what keeps rows independent.
_LAYOUT = {torch.float32: 8, torch.bfloat16: 1}
_FEWEST = {torch.float32: 3, torch.bfloat16: 1}
_MOST = {torch.float32: 96, torch.bfloat16: 1 << 62}
_PIECE = 128
_CAN_PACK = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class PackedLinear(nn.Linear):
    """`nn.Linear` that multiplies without gradient from repacked weights; they are packed anew when the weights change.

    Training, other devices and formats, and sharded weights take the ordinary way. Under autocast to bfloat16 the copy
    is in bfloat16 whatever the weights are, and saves casting them at every product. The copy costs memory once more;
    it is in no state dict.
    """

    packs = True
    _pack: tuple[int, int, Tensor] | None = None

    @classmethod
    def of(cls, linear: nn.Linear) -> PackedLinear:
        """One that shares the parameters of `linear`."""
        packed = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        packed.weight, packed.bias = linear.weight, linear.bias
        return packed

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else self.weight.dtype
        if not self._packs(input, dtype):
            return F.linear(input, self.weight, self.bias)
        weight, bias = self._packed(dtype), None if self.bias is None else self.bias.to(dtype)
        rows = input.to(dtype)
        if dtype is torch.float32:
            return _product(rows, weight, bias)
        pieces = [_alike(each, weight, bias) for each in rows.reshape(-1, self.in_features).split(_PIECE)]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(*input.shape[:-1], -1)

    def _packs(self, input: Tensor, dtype: torch.dtype) -> bool:
        """Whether rows in this format go the packed way."""
        weight, rows = self.weight, input.numel() // self.in_features
        return (
            _CAN_PACK
            and self.packs
            and dtype in _LAYOUT
            and _FEWEST[dtype] <= rows <= _MOST[dtype]
            and (weight.dtype is input.dtype or torch.is_autocast_enabled("cpu"))
            and weight.device.type == "cpu"
            and type(weight) is nn.Parameter  # neither sharded nor without storage
            and type(input) is Tensor
            and not (torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad))
        )

    def _packed(self, dtype: torch.dtype) -> Tensor:
        """The repacked weights, made when they are first asked for or have changed since."""
        weight, pack = self.weight, self._pack
        if pack is None or pack[:2] != (weight._version, weight.data_ptr()) or pack[2].dtype is not dtype:
            copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype), _LAYOUT[dtype])
            self._pack = pack = weight._version, weight.data_ptr(), copy
        return pack[2]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the weights alone."""
        return {**self.__dict__, "_pack": None}


def _product(input: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")


def _alike(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """One row goes as two: alone it may take a vector product, which sums a long row in another order."""
    if len(rows) == 1:
        return _product(rows.expand(2, -1).contiguous(), packed, bias)[:1]
    return _product(rows, packed, bias)


def pack_linears(model: nn.Module) -> None:
    """Replace every `nn.Linear` of a model, sharing its parameters."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(name, PackedLinear.of(module))


def keep_unpacked(model: nn.Module) -> None:
    """For weights that are sharded: gathered again they may have changed without a new version, and copies cost memory."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.packs = False
