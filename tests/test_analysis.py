"""wavepe.analysis against computations written out token by token in float64."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from wavepe.analysis import perplexity
from wavepe.analysis.plots import perplexity_by_length

VOCABULARY = 7


class Averages(torch.nn.Module):
    """Predicts from the mean of the embeddings seen and the place in the pass: context matters."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embedding = torch.nn.Parameter(torch.randn(VOCABULARY, 4, generator=generator) * 2)
        self.output = torch.nn.Parameter(torch.randn(4, VOCABULARY, generator=generator) * 2)
        self.dropout = torch.nn.Dropout(0.5)
        self.config = SimpleNamespace(vocab_size=VOCABULARY, num_attention_heads=1)
        self.passes = []

    def forward(self, input_ids, use_cache):
        assert not torch.is_grad_enabled()
        assert not use_cache
        self.passes.append(tuple(input_ids.shape))
        place = torch.arange(1, input_ids.shape[1] + 1)[:, None]
        mean = self.embedding[input_ids].cumsum(1) / place
        return SimpleNamespace(logits=(self.dropout(mean) + 0.1 * place.log()) @ self.output)

    def surprise(self, context, token):
        """-log p(token | context), in float64."""
        embedding = self.embedding.detach().double().numpy()
        output = self.output.detach().double().numpy()
        logits = (embedding[context].mean(0) + 0.1 * math.log(len(context))) @ output
        return np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[token]


def tokens_of(count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, VOCABULARY, count))


def by_hand(model, tokens, length, context_start):
    """exp of the mean over tokens t of each piece, seen from context_start(t) on (None: unscored).

    The passes of float32 differ from this by rounding alone.
    """
    losses = []
    tokens = tokens.numpy()
    for piece in tokens[: len(tokens) // length * length].reshape(-1, length):
        for t in range(1, length):
            start = context_start(t)
            if start is not None:
                losses.append(model.surprise(piece[start:t], piece[t]))
    return math.exp(np.mean(losses))


@pytest.mark.parametrize("length", [2, 3, 8, 17])
@pytest.mark.parametrize("count", [17, 40, 97])
def test_whole(length, count):
    model, tokens = Averages(), tokens_of(count)
    expected = by_hand(model, tokens, length, lambda t: 0)
    assert perplexity(model, tokens, length) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("window", [2, 3, 4, 5, 8, 16, 17, 30])
def test_blocks(window):
    model, tokens, length = Averages(), tokens_of(60), 17
    expected = by_hand(model, tokens, length, lambda t: t - t % window if t % window else None)
    value = perplexity(model, tokens, length, protocol="blocks", window=window)
    assert value == pytest.approx(expected, rel=1e-5)


def first_window(t, window, stride):
    """Start of the first window that holds t behind its first place, or else ends just before t."""
    starts = range(0, t, stride)
    inside = [start for start in starts if start < t < start + window]
    return inside[0] if inside else next(start for start in starts if start + window == t)


@pytest.mark.parametrize(
    ("window", "stride"),
    [(2, 1), (2, 2), (4, 1), (4, 3), (4, 4), (5, 2), (5, 5), (16, 4), (17, 17), (30, 3)],
)
def test_sliding_scores_every_token_once(window, stride):
    model, tokens, length = Averages(), tokens_of(60), 17
    expected = by_hand(model, tokens, length, lambda t: first_window(t, window, stride))
    value = perplexity(model, tokens, length, protocol="sliding", window=window, stride=stride)
    assert value == pytest.approx(expected, rel=1e-5)
    assert all(width <= window for _, width in model.passes)


def test_one_window_of_the_whole_piece_is_the_whole_protocol():
    model, tokens = Averages(), tokens_of(64)
    whole = perplexity(model, tokens, 16)
    assert perplexity(model, tokens, 16, protocol="blocks", window=16) == whole
    assert perplexity(model, tokens, 16, protocol="sliding", window=16, stride=5) == whole


@pytest.mark.parametrize("protocol", ["whole", "blocks", "sliding"])
def test_progress_counts_the_tokens_run(protocol):
    model, steps = Averages(), []
    model.config.vocab_size = 1 << 20  # one piece in a pass
    options = {"protocol": protocol, "window": 7, "stride": 3}
    perplexity(model, tokens_of(60), 17, progress=lambda *at: steps.append(at), **options)
    counts = [rows * width for rows, width in model.passes]
    assert steps == [(sum(counts[: i + 1]), sum(counts)) for i in range(len(counts))]


@pytest.mark.parametrize("spec", ["alibi", "wavelet:scales=4", "rope:inference_theta=scaled"])
@pytest.mark.parametrize(("window", "stride"), [(9, 4), (16, 16)])
def test_protocols_of_a_model_by_a_loop_over_passes(spec, window, stride):
    """Each pass by itself, each token's loss by itself."""
    pytest.importorskip("transformers")
    from hf_model import logits, patched_tiny, tokens

    model, length = patched_tiny(spec), 22
    text = tokens(1, 2 * length + 5)[0]
    found = {"whole": [], "blocks": [], "sliding": []}
    for piece in (text[:length], text[length : 2 * length]):
        found["whole"] += losses(logits(model, piece[None])[0], piece, range(1, length))
        for start in range(0, length, window):
            block = piece[start : start + window]
            found["blocks"] += losses(logits(model, block[None])[0], block, range(1, len(block)))
        scored = {0}
        for start in range(0, length, stride):
            part = piece[start : start + window]
            said = logits(model, part[None])[0]
            stop = len(part) + 1 if start + len(part) < length else len(part)
            new = [t for t in range(1, stop) if start + t not in scored]
            if stride < window:  # else the token after a window is predicted by it alone
                new = [t for t in new if t < len(part)]
            found["sliding"] += losses(said, piece[start:], new)
            scored.update(start + t for t in new)
        assert scored == set(range(length))
    for protocol, values in found.items():
        got = perplexity(model, text, length, protocol=protocol, window=window, stride=stride)
        assert got == pytest.approx(math.exp(np.mean(values)), rel=1e-5)


def losses(logits, row, places):
    """-log p of row[t] after the tokens before it."""
    logs = torch.log_softmax(logits.double(), -1)
    return [-logs[t - 1, row[t]].item() for t in places]


def test_sizes_a_protocol_does_not_use_change_nothing():
    model, tokens = Averages(), tokens_of(64)
    assert perplexity(model, tokens, 16, window=3, stride=2) == perplexity(model, tokens, 16)


def test_equal_pieces_share_a_pass_within_bounds():
    model = Averages()
    perplexity(model, tokens_of(16 * 50), 16)
    assert model.passes == [(50, 16)]
    model.passes.clear()
    model.config.vocab_size = 1 << 20  # 16 tokens' logits fill the budget
    perplexity(model, tokens_of(16 * 3), 16)
    assert model.passes == [(1, 16)] * 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_integer_dtype_and_stride(dtype):
    model, tokens = Averages(), tokens_of(40)
    strided = tokens.to(dtype).repeat_interleave(3)[::3]
    assert perplexity(model, strided, 8) == perplexity(model, tokens, 8)


def test_training_mode_comes_back_and_no_gradient_is_left():
    model = Averages()
    model.train()
    model.dropout.eval()
    perplexity(model, tokens_of(16), 8)
    assert model.training
    assert not model.dropout.training
    assert model.embedding.grad is None
    model.dropout.train()
    with pytest.raises(RuntimeError, match="broken"):
        perplexity(BrokenModel(model), tokens_of(16), 8)
    assert model.dropout.training


class BrokenModel(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **inputs):
        raise RuntimeError("broken")


def test_impossible_tokens_give_infinity():
    model = Averages()
    with torch.no_grad():
        model.output[:, 0] -= 1e6
        model.embedding.abs_()
    assert perplexity(model, torch.zeros(8, dtype=torch.int64), 8) == math.inf


@pytest.mark.parametrize("model", [None, 4, "model", Averages])
def test_a_model_is_a_module(model):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got \w+"):
        perplexity(model, torch.zeros(8, dtype=torch.int64), 4)


@pytest.mark.parametrize(
    ("tokens", "options", "error", "words"),
    [
        (list(range(6)), {}, TypeError, "list"),
        (torch.zeros(8), {}, TypeError, "float32"),
        (torch.zeros(8, dtype=torch.bool), {}, TypeError, "bool"),
        (torch.zeros(2, 8, dtype=torch.int64), {}, ValueError, r"\(2, 8\)"),
        (torch.zeros(0, dtype=torch.int64), {}, ValueError, " 4, got 0"),
        (torch.zeros(3, dtype=torch.int64), {}, ValueError, " 4, got 3"),
        (torch.full((8,), VOCABULARY), {}, ValueError, r"0\.\.6, got 7\.\.7"),
        (torch.full((8,), -1), {}, ValueError, r"0\.\.6, got -1\.\.-1"),
        (torch.zeros(8, dtype=torch.int64), {"length": 1}, ValueError, "at least 2, got 1"),
        (torch.zeros(8, dtype=torch.int64), {"length": 4.0}, TypeError, "an integer, got 4.0"),
        (torch.zeros(8, dtype=torch.int64), {"protocol": "half"}, ValueError, "half.*sliding"),
        (torch.zeros(8, dtype=torch.int64), {"protocol": None}, TypeError, "whole.*got None"),
        (torch.zeros(8, dtype=torch.int64), {"protocol": "blocks"}, ValueError, "window="),
        (torch.zeros(8, dtype=torch.int64), {"protocol": "blocks", "window": 1},
         ValueError, "window must be at least 2, got 1"),
        (torch.zeros(8, dtype=torch.int64), {"protocol": "sliding", "window": 4}, ValueError,
         "stride="),
        (torch.zeros(8, dtype=torch.int64), {"protocol": "sliding", "window": 4, "stride": 0},
         ValueError, "stride must be at least 1, got 0"),
        (torch.zeros(8, dtype=torch.int64), {"protocol": "sliding", "window": 4, "stride": 5},
         ValueError, "stride must be at most the window, 4, got 5"),
    ],
)  # fmt: skip
def test_bad_input(tokens, options, error, words):
    with pytest.raises(error, match=words):
        perplexity(Averages(), tokens, **{"length": 4, **options})


RUNS = [
    {"encoding": f"encoding-{number}", "seed": seed, "perplexity": {"8": 3.0 + seed, "16": 9.5}}
    for seed in range(2)
    for number in range(10)
]


def test_plot_of_perplexity(tmp_path):
    pytest.importorskip("matplotlib")
    for count in (1, len(RUNS)):
        path = tmp_path / f"{count}.png"
        perplexity_by_length(RUNS[:count], path, train_length=8, title="a title")
        assert path.read_bytes().startswith(b"\x89PNG")
    for error, match, runs, options in (
        (TypeError, "runs must be a list of mappings, got int", 3, {}),
        (TypeError, "train_length must be an integer, got None", RUNS, {"train_length": None}),
        (ValueError, "train_length must be at least 1, got 0", RUNS, {"train_length": 0}),
        (TypeError, "title must be a string, got 3", RUNS, {"title": 3}),
    ):
        with pytest.raises(error, match=match):
            perplexity_by_length(runs, tmp_path / "none.png", **{"train_length": 8, **options})
    with pytest.raises(ValueError, match="at least one run"):
        perplexity_by_length([], tmp_path / "none.png", train_length=8)


def drawn(runs, monkeypatch, path):
    """The figure that was saved, laid out."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **options: figures.append(figure)
        or save(figure, *args, **options)
    )  # fmt: skip
    perplexity_by_length(runs, path, train_length=8)
    figures[0].draw_without_rendering()  # sizes in the figure's own dots, not the file's
    return figures[0]


LONG = ["rope:type=longrope,factors=" + "+".join(f"{i}.{k}" for i in range(48)) for k in range(9)]


@pytest.mark.parametrize(
    "specs", [["none", LONG[0]], [*LONG[:4], *"abcd"], [*LONG, *"abcdefghijk"]]
)
def test_long_specs_leave_the_plot_its_room(monkeypatch, tmp_path, specs):
    pytest.importorskip("matplotlib")
    runs = [{"encoding": spec, "seed": 0, "perplexity": {"8": 3.0, "16": 4.0}} for spec in specs]
    figure = drawn(runs, monkeypatch, tmp_path / "long.png")
    axes, (legend,) = figure.axes[0], figure.legends
    assert axes.bbox.width > 0.55 * figure.bbox.width
    assert axes.bbox.height > 3 * figure.dpi
    below = next(text for text in figure.texts if text.get_text())
    for part in (legend, below):
        box = part.get_window_extent()
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    assert below.get_window_extent().y1 < axes.bbox.y0
    notes = "".join(map(str.strip, below.get_text().splitlines()))
    assert [spec for spec in specs if spec in LONG and spec not in notes] == []


def test_lengths_that_lie_close_are_readable(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    perplexities = {str(8 * i): 3.0 for i in range(1, 33)}
    runs = [{"encoding": "none", "seed": 0, "perplexity": perplexities}]
    axes = drawn(runs, monkeypatch, tmp_path / "close.png").axes[0]
    labels = [label for label in axes.get_xticklabels() if label.get_text()]
    assert labels[0].get_text() == "8"
    assert len(labels) > 5
    boxes = [label.get_window_extent() for label in labels]
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


def test_a_name_is_no_formula(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    runs = [{"encoding": "$\\frac$", "seed": 0, "perplexity": {"8": 3.0}}]
    drawn(runs, monkeypatch, tmp_path / "formula.png")
