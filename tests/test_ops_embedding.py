"""embedding_backward: the order of sums that csrc/ops/embedding.h states, to the bit, on every device."""
from __future__ import annotations

import time
from collections.abc import Callable

import op_cases
import pytest
import reference_ops as reference
import torch
from op_cases import each_device, each_type, threads_change_no_bit
from torch import Tensor

from megatrain_torch import ops

pytestmark = each_device


def runs(*lengths: int) -> list[int]:
    """Ids 0, 1, 2 ... so many times each."""
    return [v for v, length in enumerate(lengths) for _ in range(length)]


# name: ids, rows, width
CASES: dict[str, tuple[list[int], int, int]] = {
    "one token": ([3], 8, 16),
    "each once": (list(range(40)), 40, 24),
    "few of many": ([500, 3, 3, 999, 0, 500], 1000, 64),
    "odd width": ([1, 1, 2, 0, 1] * 7, 5, 33),
    "width 1": ([1, 0, 1] * 3, 3, 1),
    "no tokens": ([], 6, 8),
    "no columns": ([1, 2], 6, 0),
    "no rows": ([], 0, 8),
    "one whole piece": (runs(256), 2, 8),
    "a piece and one": (runs(257), 2, 8),
    "two pieces": (runs(5, 512, 3), 3, 40),
    "pieces that begin close together": (runs(257, 257, 257, 257, 1, 300), 6, 12),
    "a last piece of one, then a long row": (runs(100, 513, 600, 1, 769), 5, 24),
    "long rows amid short ones": (runs(1, 300, 2, 256, 255, 1000, 1, 1), 9, 136),
    "many threads": (runs(3, 700) + list(range(600)), 2000, 200),
}


def problem(device: str, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """dy and ids, shuffled, and the number of rows."""
    listed, rows, width = CASES[name]
    g = torch.Generator().manual_seed(len(listed))
    ids = torch.tensor(listed, dtype=torch.int64)[torch.randperm(len(listed), generator=g)]
    return torch.randn(len(listed), width, generator=g).to(device, dtype), ids.to(device), rows


def test_the_reference_is_autograds(device: str) -> None:
    dy, ids, rows = problem(device, "long rows amid short ones", torch.float32)
    table = torch.zeros(rows, dy.shape[1], dtype=torch.float64, device=device, requires_grad=True)
    torch.nn.functional.embedding(ids, table, padding_idx=3).backward(dy.double())
    wanted, size = table.grad, torch.zeros_like(table).index_add_(0, ids, dy.double().abs())
    # No addition is followed by more than 255 of its piece and 3 of pieces, each off by 2^-24.
    assert ((reference.embedding_backward(dy, ids, rows, 3).double() - wanted).abs() <= 259 * 2**-24 * size).all()


@pytest.mark.parametrize("name", CASES)
@each_type
def test_sums_have_the_stated_order_to_the_bit(device: str, dtype: torch.dtype, name: str) -> None:
    dy, ids, rows = problem(device, name, dtype)
    assert torch.equal(ops.embedding_backward(dy, ids, rows), reference.embedding_backward(dy, ids, rows).to(dtype))


@each_type
def test_the_padding_row_gets_none(device: str, dtype: torch.dtype) -> None:
    dy, ids, rows = problem(device, "long rows amid short ones", dtype)
    for padding in (5, 0, rows - 1):
        got = ops.embedding_backward(dy, ids, rows, padding)
        assert not got[padding].any()
        assert torch.equal(got, reference.embedding_backward(dy, ids, rows, padding).to(dtype))


@each_type
@pytest.mark.parametrize("first", [0, 1, 8])
def test_strided_gradients(device: str, dtype: torch.dtype, first: int) -> None:
    dy, ids, rows = problem(device, "two pieces", dtype)
    wide = torch.randn(dy.shape[0], 64, device=device).to(dtype)
    wide[:, first:first + 40] = dy
    got = ops.embedding_backward(wide[:, first:first + 40], ids, rows)
    assert torch.equal(got, ops.embedding_backward(dy, ids, rows))


def test_a_rows_bits_depend_on_its_own_tokens_alone(device: str) -> None:
    dy, ids, rows = problem(device, "long rows amid short ones", torch.float32)
    whole = ops.embedding_backward(dy, ids, rows)
    for v in (1, 5):
        assert torch.equal(ops.embedding_backward(dy[ids == v], ids[ids == v], rows)[v], whole[v])


def test_a_tall_table_is_written_whole(device: str) -> None:
    ids = torch.tensor([0, 152_063, 77_777], device=device)
    got = ops.embedding_backward(torch.ones(3, 8, dtype=torch.bfloat16, device=device), ids, 152_064)
    assert got.sum() == 24 and (got[ids] == 1).all()


def test_one_id_for_all_tokens_is_no_single_threads_work(device: str) -> None:
    ids = torch.full((30_000,), 7, device=device)
    dy = torch.ones(30_000, 64, dtype=torch.float32, device=device)
    ops.embedding_backward(dy, ids, 8)[7].tolist()
    begin = time.perf_counter()
    assert ops.embedding_backward(dy, ids, 8)[7].tolist() == [30_000.0] * 64
    if device == "cuda":
        assert time.perf_counter() - begin < 0.05


def test_threads_change_no_bit(device: str) -> None:
    dy, ids, rows = problem(device, "many threads", torch.float32)
    threads_change_no_bit(lambda: [ops.embedding_backward(dy, ids, rows)])


def test_opcheck(device: str) -> None:
    ids, order = torch.sort(torch.tensor([1, 0, 1], device=device), stable=True)
    args = torch.randn(3, 8, device=device), ids, order, -1, torch.empty(4, 8, device=device)
    torch.library.opcheck(torch.ops.megatrain.embedding_backward, args)


def call(dy: Tensor, ids: Tensor, out: Tensor) -> None:
    torch.ops.megatrain.embedding_backward(dy, ids, torch.arange(ids.numel(), device=ids.device), -1, out)


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], object], str]] = {
    "type": (lambda x, i: call(x.double(), i, x), "embedding_backward: dy must be float32"),
    "out's type": (lambda x, i: call(x, i, x.bfloat16()), "out is BF16, not F32"),
    "ids' type": (lambda x, i: call(x, i.int(), x), "ids is I32, not I64"),
    "ids' number": (lambda x, i: call(x, i[:2], x), r"ids must be \[4\]"),
    "width": (lambda x, i: call(x, i, x.view(6, 2)), r"out is \[6, 2\], not \[6, 3\]"),
    "columns": (lambda x, i: call(x.view(3, 4).t(), i, x), "dy has a stride of 4 in its last dimension"),
}


test_what_does_not_fit_is_refused = op_cases.refused(REFUSED, (4, 3), (4,))


@pytest.mark.parametrize("bad", [-1, 5])
def test_an_id_outside_of_the_table(device: str, bad: int) -> None:
    """Refused on the CPU; on CUDA it adds to nothing: looking would make the host wait."""
    dy, ids = torch.ones(3, 8, device=device), torch.tensor([1, bad, 1], device=device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match=f"id {bad} is outside of the table's 5 rows"):
            ops.embedding_backward(dy, ids, 5)
    else:
        assert ops.embedding_backward(dy, ids, 5).sum(1).tolist() == [0, 16, 0, 0, 0]
