"""The attention benchmarks: their judge, their rivals, and each study at a tiny size."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent

import wavepe

from benchmarks import (
    attention,
    attention_inputs,
    attention_memory,
    attention_profile,
    bench,
    bench_attention,
)
from benchmarks.attention_inputs import Inputs, dense, exact_results, gathered, judged, skewed

QUICK = ["--quick", "--repeats", "2"]


def in_float64(x):
    return Inputs(*(t.double() for t in (x.q, x.k, x.v, x.grad, x.p)))


def close(got, right):
    torch.testing.assert_close(got, right, rtol=0, atol=1e-12)


def with_gradients(forward, leaves, grad):
    leaves = [t.clone().requires_grad_() for t in leaves]
    out = forward(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def test_the_judge_is_the_formula(monkeypatch):
    """Blocks of three queries, against autograd through the whole score matrix; a table, a bias."""
    x = in_float64(Inputs.make(2, 20, 16))
    monkeypatch.setattr(attention_inputs, "_JUDGED_AT_ONCE", 3 * 2 * 20)
    values = torch.randn(2, 20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    delta = torch.arange(20)[:, None] - torch.arange(20)

    def attention(q, k, v, added):
        mask = added.masked_fill(delta < 0, -torch.inf)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)

    def with_table(q, k, v, p):
        return attention(q, k, v, torch.einsum("bhid,ijd->bhij", q, p[delta.clamp(min=0)]) / 4)

    def with_bias(q, k, v, bias):
        return attention(q, k, v, bias[:, delta.clamp(min=0)])

    wanted = with_gradients(with_table, (x.q, x.k, x.v, x.p), x.grad)
    for got, right in zip(exact_results(x, x.p, leaves=("q", "k", "v", "p")), wanted, strict=True):
        close(got, right)
    wanted = with_gradients(with_bias, (x.q, x.k, x.v, values), x.grad)
    exact = exact_results(x, None, leaves=("q", "k", "v", "bias"), bias=values)
    for got, right in zip(exact, wanted, strict=True):
        close(got, right)


def test_the_judge_knows_slopes_short_tables_and_one_query():
    x = in_float64(Inputs.make(2, 20, 16).with_learned(5))
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)
    delta = torch.arange(20)[:, None] - torch.arange(20)
    bias = (x.q @ x.p.T).gather(-1, delta.clamp(0, 4).expand(1, 2, -1, -1)) * (delta < 5) / 4
    bias = bias - slopes[:, None, None] * delta
    mask = bias.masked_fill(delta < 0, -torch.inf)
    right = torch.nn.functional.scaled_dot_product_attention(x.q, x.k, x.v, mask)
    (out,) = exact_results(x, x.p, slopes)
    close(out, right)
    last = Inputs(x.q[:, :, -1:], x.k, x.v, x.grad, x.p)
    (row,) = exact_results(last, x.p, slopes)
    close(row, right[:, :, -1:])


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_beside_slopes_and_nothing(gradients, dtype):
    case = bench_attention.bias(Inputs.make(2, 20, 16, dtype), gradients)
    assert case.judge(case.ours()).ok
    assert case.judge(case.rivals["dense"]()).ok
    assert list(case.beside) == ["slopes", "plain"]
    for name, call in case.beside.items():  # less than the case asks: no gradient of a bias
        out = call()[0] if gradients else call()
        assert name in case.floor
        assert not torch.equal(out, case.ours()[0] if gradients else case.ours())
    assert len(case.ours()) == 5 or not gradients


def test_a_wrong_result_is_over_its_bound():
    x = Inputs.make(2, 20, 16)
    verdict = judged(x, x.p, leaves=("q",))
    out, dq = exact_results(x, x.p, leaves=("q",))
    assert verdict((out, dq)).ok
    for wrong in (out * (1 + 1e-4), out * float("nan"), exact_results(x, None)[0]):
        assert not verdict((wrong, dq)).ok
    assert not verdict((out, dq.roll(1, 2))).ok


@pytest.mark.parametrize("rows", [20, 5])
def test_rivals_compute_the_same(rows):
    x = in_float64(Inputs.make(2, 20, 16).with_learned(rows))
    (right,) = exact_results(x, x.p)
    for way in (gathered, dense):
        got = way(x.q, x.k, x.v, x.p, x.index, x.hidden, x.near)
        close(got, right)
    if rows == 20:
        got = skewed(x.q, x.k, x.v, x.p, x.hidden)
        close(got, right)


def test_own_calls_are_timed_in_each_variant(tmp_path):
    file = tmp_path / "results.json"
    assert bench.main(["attention", *QUICK, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    first = [row for row in rows if (row["op"], row["size"]) == (rows[0]["op"], rows[0]["size"])]
    first = [row for row in first if row["dtype"] == "float32"]
    plain = [row["variant"] for row in first if row["who"] == "plain"]
    assert plain == [row["variant"] for row in first if row["who"] == "wavepe"]
    assert set(plain) == set(wavepe.variants())
    for row in (row for row in first if row["who"] == "wavepe"):
        (own,) = (r for r in first if (r["who"], r["variant"]) == ("plain", row["variant"]))
        quotient = own["seconds"]["median"] / row["seconds"]["median"]
        assert row["ratios"]["plain"]["median"] == pytest.approx(quotient, rel=1e-4)


@pytest.mark.slow
def test_memory_of_a_tiny_call(tmp_path, capsys, monkeypatch):
    chosen = [
        {"kind": kind, "heads": 1, "length": 512, "threads": 1} for kind in ("wavelets", "gather")
    ]
    monkeypatch.setattr(attention_memory, "configurations", lambda quick: chosen)
    file = tmp_path / "memory.json"
    assert attention.main(["memory", "--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    for row in rows:
        assert row["inputs"] == 3 * 512 * 64 * 4
        assert row["over_inputs"] == pytest.approx(row["growth"] / row["inputs"])
        assert row["growth"] > row["inputs"]
    assert rows[1]["growth"] > 4 * 512 * 512 * 4  # several score matrices
    assert "| wavelets | 1 x 512 x 64 | 1 | 0.4 MiB |" in capsys.readouterr().out


def test_too_much_memory_fails():
    row = {"kind": "wavelets", "length": attention_memory.LENGTH, "over_inputs": 6.1}
    assert attention_memory.too_much({"rows": [row]}) == [row]
    for other in ({"over_inputs": 5.9}, {"kind": "sdpa"}, {"length": 64}):
        assert not attention_memory.too_much({"rows": [row | other]})


def test_every_kernel_of_the_profile_is_there():
    """A function that gets a new name must not fall silently into "rest"."""
    kernels = "".join(path.read_text() for path in (ROOT / "csrc" / "kernels").glob("*.c"))
    defined = set(re.findall(r"NAME\((\w+)\)\(", kernels))
    for pattern in attention_profile.PARTS.values():
        for name in pattern.split("|"):
            assert name.startswith("__") or any(re.match(name, each) for each in defined), name


@pytest.mark.slow
def test_profile_of_a_tiny_call(capsys):
    failed = attention.main(["profile", "--quick"])
    out, err = capsys.readouterr()
    if failed:  # there is no perf, or it may not sample here
        assert "perf" in err
        pytest.skip(err)
    assert "| 170 x 48 x 16 | plain, forward |" in out


def test_the_profile_needs_perf(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert attention.main(["profile", "--quick"]) == 1
    assert "needs perf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("study", "shown"),
    [
        ("threads", "| 48 x 16 |"),
        ("requests", "| 3 x 1 x 32, float32 | 2 |"),
        pytest.param("decode", "| 4 / 2 x 48 x 16, 2, float32 |", marks=pytest.mark.slow),
        pytest.param("tails", "|", marks=pytest.mark.slow),
        pytest.param("terms", "| `nn.Attention` |", marks=pytest.mark.slow),
    ],
)
def test_studies_leave_the_threads_as_before(study, shown, capsys):
    before = torch.get_num_threads()
    assert attention.main([study, *QUICK]) == 0
    assert torch.get_num_threads() == before
    assert shown in capsys.readouterr().out
