"""Repacked weights: the same products, none stale, and in bfloat16 rows that do not depend on their neighbours."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adaflash.decoding.cache import LanePool
from adaflash.decoding.engine import Engine
from adaflash.length.fixed import FixedLength, FullBlock
from adaflash.linear import PackedLinear, pack_linears
from adaflash.targets.attention import Layout, PackedPass, packed_attention
from adaflash.targets.hf import HFTarget, TargetOptions
from adaflash.types import Request, Segments

DENSE = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma3_text",
)  # experts multiply in groups, sinks have kernels of their own
NATIVE = TargetOptions(dtype="auto").format is torch.bfloat16
native = pytest.mark.skipif(not NATIVE, reason="this machine does not multiply bfloat16 natively: auto is float32 here")


def linear(bias: bool = False, dtype: torch.dtype = torch.float32) -> PackedLinear:
    torch.manual_seed(0)
    return PackedLinear(96, 160, bias).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 64, 97, 300])
def test_products_are_those_of_an_ordinary_linear(rows: int, bias: bool) -> None:
    layer, x = linear(bias), torch.randn(2, rows, 96)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)
    half = layer.to(torch.bfloat16)
    exact = F.linear(x.bfloat16().double(), half.weight.double(), None if half.bias is None else half.bias.double())
    torch.testing.assert_close(half(x.bfloat16()).double(), exact, rtol=2**-7, atol=2**-7)


def test_weights_that_changed_are_packed_anew() -> None:
    layer, x = linear(), torch.randn(4, 96)
    before = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(layer(x), 2 * before)
    layer.weight = nn.Parameter(torch.zeros(160, 96), requires_grad=False)
    assert not layer(x).any()
    layer.load_state_dict({"weight": torch.ones(160, 96)})
    torch.testing.assert_close(layer(x), x.sum(-1, keepdim=True).expand(4, 160))


def test_training_takes_the_ordinary_way() -> None:
    layer, x = linear().requires_grad_(), torch.randn(4, 96, requires_grad=True)
    layer(x).sum().backward()
    plain = F.linear(x, layer.weight)
    assert torch.equal(layer(x), plain) and layer._pack is None
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(4, 96))


def test_autocast_computes_in_half_whatever_the_weights_are() -> None:
    layer, x = linear(), torch.randn(5, 96)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), F.linear(x, layer.weight), rtol=2e-2, atol=5e-2)
    assert layer(x).dtype is torch.float32  # packed in float32 again


def test_copies_and_pickles_carry_the_weights_alone() -> None:
    layer, x = linear(), torch.randn(4, 96)
    out = layer(x)
    assert layer._pack is not None
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other._pack is None and torch.equal(other(x), out)
    assert list(layer.state_dict()) == ["weight"]


def test_replaced_modules_share_their_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4, bias=False)))
    weights, x = dict(model.named_parameters()), torch.randn(4, 8)
    before = model(x)
    pack_linears(model)
    assert all(a is b for a, b in zip(model.parameters(), weights.values(), strict=True))
    assert sum(isinstance(each, PackedLinear) for each in model.modules()) == 2
    torch.testing.assert_close(model(x), before)


@native
@pytest.mark.parametrize(
    "shape", [(64, 64), (576, 1536), (1536, 576), (2048, 1024), (4096, 4096), (4864, 896), (100, 37)]
)
def test_in_bfloat16_a_product_has_the_same_bits_in_any_company(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = PackedLinear(*shape, bias=False).bfloat16().requires_grad_(False)
    x = torch.randn(257, shape[0]).bfloat16()
    whole = layer(x)
    for count in (1, 2, 3, 5, 8, 16, 33, 128, 129):
        for start in (0, 1, 7, 128):
            assert torch.equal(layer(x[start : start + count]), whole[start : start + count]), (count, start)
    assert torch.equal(layer(x.view(1, 257, -1)), whole[None])


@native
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("past", [5, 62, 63, 187, 250, 300, 505])
def test_in_bfloat16_attention_of_a_row_has_the_same_bits_in_any_company(past: int, groups: int) -> None:
    """Many draws: where kernels differ, one result in a thousand is rounded to another number."""
    torch.manual_seed(0)
    width, module = 8, SimpleNamespace(layer_idx=0)
    for _ in range(40):
        pool = LanePool(1, past + width)
        key, value = (2 * torch.randn(2, past + width, 3, 64)).bfloat16()
        pool.write(0, key, value, Segments((0,), (0,), (past + width,)))
        query = (2 * torch.randn(1, 3 * groups, width, 64)).bfloat16()

        def attend(count: int, layout: Layout, pool: LanePool = pool, query: Tensor = query) -> Tensor:
            """All rows, `count` at a time."""
            outputs = []
            for rows, first in zip(query.split(count, dim=2), range(0, width, count), strict=True):
                segments = Segments((0,), (past + first,), (rows.shape[2],))
                packed = PackedPass(segments, pool, torch.device("cpu"), layout, torch.bfloat16)
                outputs.append(packed_attention(module, rows, rows[:, :3], rows[:, :3], None, packed=packed)[0][0])  # type: ignore[arg-type]
            return torch.cat(outputs)

        plain = attend(1, "packed")
        for count in (1, 2, 3, 4, 8):
            assert torch.equal(attend(count, "packed"), plain), count
            assert torch.equal(attend(count, "padded"), plain), count


def states(target: HFTarget, prompt: Tensor, window: Tensor, lanes: int, layout: Layout) -> Tensor:
    """States [lanes, n, H] of one window after one prompt, in as many lanes at once."""
    pool = LanePool(lanes, len(prompt) + 16)
    places = tuple(range(lanes))
    target.read(prompt.repeat(lanes), Segments(places, (0,) * lanes, (len(prompt),) * lanes), (), pool)
    segments = Segments(places, (len(prompt),) * lanes, (len(window),) * lanes)
    return target.read(window.repeat(lanes), segments, (), pool, layout).hidden.unflatten(0, (lanes, -1))


@native
@pytest.mark.parametrize("family", DENSE)
def test_in_bfloat16_a_row_is_its_own_whatever_stands_beside_it(family: str) -> None:
    """Plain steps, windows of any width, any number of lanes and both layouts: the same bits."""
    target = tiny.target(family, dtype=torch.bfloat16)
    for length in (1, 13, 61, 64, 100):
        prompt, window = torch.randint(0, 96, (length,)), torch.randint(0, 96, (8,))
        pool = LanePool(1, length + 16)
        target.read(prompt, Segments((0,), (0,), (length,)), (), pool)
        steps = [target.read(window[i : i + 1], Segments((0,), (length + i,), (1,)), (), pool).hidden for i in range(8)]
        plain = torch.cat(steps)
        for width in (1, 2, 5, 8):
            for lanes, layout in ((1, "packed"), (3, "packed"), (3, "padded")):
                got = states(target, prompt, window[:width], lanes, layout)  # type: ignore[arg-type]
                assert torch.equal(got, plain[:width].expand_as(got)), (length, width, lanes, layout)
        assert torch.equal(target.head(plain), torch.cat([target.head(row[None]) for row in plain]))


@native
@pytest.mark.parametrize("family", DENSE)
def test_bfloat16_texts_are_the_plain_ones_token_for_token(family: str) -> None:
    target = tiny.target(family, dtype=torch.bfloat16)
    requests = [Request(each.tokens, 24) for each in tiny.prompts(3)]
    plain = [each.tokens.tolist() for each in Engine(target, lanes=1).generate(requests)]
    drafter = tiny.drafter(target, noise=0.01)
    for policy, lanes in ((FullBlock(), 1), (FixedLength(3), 3)):
        texts = [each.tokens.tolist() for each in Engine(target, drafter, policy, lanes=lanes).generate(requests)]
        assert texts == plain
