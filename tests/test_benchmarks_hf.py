"""benchmarks/hf_models.py at tiny sizes, and the claims of the figures that are kept."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from processes import forked

ROOT = Path(__file__).parent.parent

from benchmarks import hf_calls, hf_decoding, hf_models, hf_profile
from benchmarks.hf_models import CONTENDERS, PHASES, STOCK, Size
from docs.writers import speed, swap

TINY = {"layers": 1, "hidden": 128}
MIB = 1 << 20


def in_a_fork(command, cwd=None, real=hf_models.subprocess.run, **options):
    if command[0] == sys.executable:
        return forked(*command[1:], cwd=cwd)
    return real(command, cwd=cwd, **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The results of the whole command, whose processes are forks here."""
    file = tmp_path_factory.mktemp("results") / "results.json"
    words = "--lengths 24 --padded 32 --layers 1 --hidden 128 --rounds 2"
    threads = torch.get_num_threads()
    words = [*words.split(), "--contenders", STOCK, "alibi", "--json", str(file)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hf_models.subprocess, "run", in_a_fork)
        code = hf_models.main(words)
    assert code == 0
    assert torch.get_num_threads() == threads
    return json.loads(file.read_text())


@pytest.mark.slow
def test_every_row_has_time_and_memory_of_both_phases(run):
    rows = [(row["length"], row["sequences"], row["padded"]) for row in run["rows"]]
    assert rows == [(24, 1, False), (32, 2, True)]
    for row in run["rows"]:
        for phase in PHASES:
            seconds = row[phase]["seconds"]
            assert list(seconds) == list(row["memory"]) == [STOCK, "alibi"]
            assert row[phase]["ratio"][STOCK] == row[phase]["rounds"][STOCK] == 1
            quotient = seconds["alibi"]["min"] / seconds[STOCK]["min"]
            assert row[phase]["ratio"]["alibi"] == quotient > 0
        for name in row["memory"]:
            # so few pages are counted too coarsely to be compared
            assert all(0 <= row["memory"][name][phase] < 100 * MIB for phase in PHASES)
    about = run["environment"]
    assert about["threads"] == 1
    assert about["torch"] == torch.__version__
    assert run["sizes"] == {**TINY, "heads": 2}


@pytest.mark.slow
def test_tables(run):
    time, memory = hf_models.time_table(run), hf_models.memory_table(run)
    for table in (time, memory):
        lines = table.splitlines()
        assert lines[0] == "| sequences x length | | stock | alibi |"
        assert [line.split(" | ")[0] for line in lines[2:]] == [
            "| 1 x 24", "| 1 x 24", "| 2 x 32, padded", "| 2 x 32, padded",
        ]  # fmt: skip
        assert all(line.count("(") == 1 for line in lines[2:])  # stock has no ratio
    ratio = run["rows"][1]["step"]["ratio"]["alibi"]
    assert time.splitlines()[-1].endswith(f"ms ({ratio:.2f}) |")
    assert memory.splitlines()[-1].count(" MiB (") == 1


def test_the_contenders_differ_in_position_alone():
    models = {name: hf_models.new_model(spec, **TINY).eval() for name, spec in CONTENDERS.items()}
    stock = models[STOCK]
    assert stock.config._attn_implementation == "sdpa"
    outputs = {name: hf_models.forward_of(model, Size(24))() for name, model in models.items()}
    for name, model in models.items():
        for key, weight in stock.state_dict().items():
            assert torch.equal(model.state_dict()[key], weight)
        if name == "rope":
            torch.testing.assert_close(outputs[name], outputs[STOCK])
        elif name != STOCK:
            assert (outputs[name] - outputs[STOCK]).abs().max() > 1e-3


def test_a_quarter_of_the_first_sequence_is_padding():
    given = hf_models.inputs(Size(32, 2, True))
    assert given["attention_mask"].tolist() == [[0] * 8 + [1] * 24, [1] * 32]
    assert "attention_mask" not in hf_models.inputs(Size(32))


def test_rounds_fall_with_the_number_of_tokens():
    sizes = (Size(16), Size(512), Size(2048), Size(2048, 2), Size(8192))
    assert [size.rounds(20) for size in sizes] == [20, 20, 5, 3, 3]
    assert Size(512).rounds(1) == 1


def test_a_step_trains_and_leaves_no_gradients():
    model = hf_models.new_model(None, **TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = hf_models.step_of(model, optimizer, Size(32, 2, True))
    losses = [step() for _ in range(5)]
    assert losses[-1] < losses[0] < 2 * math.log(hf_models.VOCABULARY)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_growth_is_that_to_the_peak():
    size = 64 * MIB  # more than malloc ever keeps

    def call():
        one = torch.ones(size // 4)
        del one
        return torch.ones(size // 4)

    # The system counts a process's pages in lots, larger ones where there are more cores, and the
    # process touches other pages, too.
    assert size - 8 * MIB <= hf_models.growth(call) <= size + 8 * MIB


def test_decoding_appends_to_a_cache_that_is_cut_again():
    call, cache = hf_models.decoding_of(hf_models.new_model(None, **TINY).eval(), 16)
    first = call()
    assert cache.get_seq_length() == 17
    cache.crop(-1)
    torch.testing.assert_close(call(), first, rtol=0, atol=0)


def test_kinds_of_operators():
    kinds = {
        "wavepe::attention_forward": "attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
        "aten::addmm": "linear layers",
        "aten::_fused_adamw_": "loss, optimizer",
        "wavepe::rope_table": "other operators",
        "aten::mul": "other operators",
        "MulBackward0": None,
    }
    assert {name: hf_profile.kind_of(name) for name in kinds} == kinds


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    assert hf_profile.main(["--quick", "--repeats", "1", "--json", str(path)]) == 0
    return path


@pytest.mark.slow
def test_the_parts_of_a_call_sum_to_its_time(profiled):
    rows = json.loads(profiled.read_text())["rows"]
    assert [row["phase"] for row in rows] == [x.phase for x in hf_profile.SITUATIONS]
    for row in rows:
        for parts in row["shares"].values():
            assert sum(parts.values()) == pytest.approx(1)
            assert parts["linear layers"] > 0
            assert parts["attention"] > 0
            assert (parts["loss, optimizer"] > 0) == (row["phase"] == hf_profile.TRAINING)


# Python calls of wavepe per pass and per layer: lower them when a change saves some.
CALLS = {"rope": (30, 6), "wavelet": (18, 10), hf_calls.RECOMMENDED: (30, 29)}


def test_a_pass_stays_within_its_calls():
    rows = hf_calls.measure()
    assert [(row["phase"], row["encoding"]) for row in rows] == [
        (phase, spec) for phase in hf_calls.PHASES for spec in CALLS
    ]
    for row in rows:
        per_pass, per_layer = CALLS[row["encoding"]]
        assert 0 < row["per pass"] <= per_pass, row
        assert 0 < row["per layer"] <= per_layer, row
        assert row["per pass"] + 2 * row["per layer"] == sum(row["calls"].values())


def test_models_of_one_shape_share_their_weights():
    models = hf_models.same_weights(hf_decoding.TINY, ("stock", "rope", "none"))
    weights = [[id(weight) for weight in model.parameters()] for model in models.values()]
    assert weights[0] == weights[1] == weights[2]
    assert models["stock"].config._attn_implementation == "sdpa"
    assert models["rope"].config.position_encoding == "rope"


def test_decoding(capsys):
    assert hf_decoding.main(["--quick", "--repeats", "1"]) == 0
    assert "| 2 layers of 64, 2 / 1 heads; batch 8 |" in capsys.readouterr().out


def test_kept_figures_of_the_swap_hold_the_claims():
    kept = json.loads((ROOT / swap.SWAP).read_text())
    once, four = str(kept["train_length"]), str(4 * kept["train_length"])
    rope, raw, more, swapped = (each["perplexity"] for each in kept["runs"])
    assert min(raw.values()) > 4 * rope[once]
    assert swapped[once] < 1.05 * more[once]
    assert swapped[four] < 1.05 * swapped[once]
    assert more[four] > 2 * more[once]
    assert kept["runs"][2]["steps"] == kept["runs"][3]["steps"]


def test_kept_figures_of_speed_hold_the_claims():
    kept = json.loads((ROOT / speed.MODELS).read_text())
    assert [row["length"] for row in kept["rows"]] == [*hf_models.LENGTHS, hf_models.PADDED]
    assert list(kept["rows"][0]["memory"]) == list(CONTENDERS)
    padded, first, last = kept["rows"][-1], kept["rows"][0], kept["rows"][-2]
    for phase in PHASES:
        for name in ("wavelet", "alibi"):
            assert all(row[phase]["ratio"][name] < 1.1 for row in kept["rows"]), name
            assert padded[phase]["ratio"][name] < 0.8, name
            assert padded["memory"][name][phase] < 0.8 * padded["memory"][STOCK][phase], name
        for name in CONTENDERS:
            grown = last["memory"][name][phase] / first["memory"][name][phase]
            assert grown < 1.1 * last["length"] / first["length"], name
