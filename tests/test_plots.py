"""`wavepe plot` and plots of perplexity: the pictures, their numbers against the oracle, errors."""

import itertools
import math
import sys

import numpy as np
import oracle
import pytest
import wavepe
from cases import assert_within, forget_registrations
from commands import refused, run
from processes import output

pytest.importorskip("matplotlib")

from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from wavepe.analysis import plots
from wavepe.analysis.plots.drawing import line_looks
from wavepe.cli.plot import PICTURES

MOST_BYTES = 200_000


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved."""
    saved, save = [], Figure.savefig

    def keep(figure, *args, **options):
        saved.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


@pytest.fixture
def png(tmp_path, monkeypatch):
    """A file for a picture whose numbers a test is about: it stays empty, as drawing is slow."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: open(path, "wb").close())
    return tmp_path / "picture.png"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Run a test in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ------------------------------------------------------------------ the command


@pytest.mark.parametrize("name", PICTURES)
def test_each_picture(name, folder, capsys, figures):
    assert run(capsys, "plot", name) == (0, f"picture: {name}.png\n", "")
    picture = (folder / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < MOST_BYTES
    assert len(list(folder.iterdir())) == 1
    (figure,) = figures
    assert_texts_apart(figure)


def assert_texts_apart(figure):
    """Assert that no text is cut, and that texts do not overlap."""
    figure.draw_without_rendering()
    boxes = {text: text.get_window_extent() for text in drawn_texts(figure)}
    assert len(boxes) > 5
    for text, box in boxes.items():
        assert min(box.x0, box.y0) >= -1, text
        assert box.x1 <= figure.bbox.x1 + 1, text
        assert box.y1 <= figure.bbox.y1 + 1, text
    for (a, one), (b, other) in itertools.combinations(boxes.items(), 2):
        across = min(one.x1, other.x1) - max(one.x0, other.x0)
        down = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert across < 1 or down < 1, (a, b)


def drawn_texts(figure):
    """Return all texts that are not empty; tick labels only within the range of the axis."""
    hidden = set()
    for axis in figure.findobj(Axis):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            outside = not low <= tick.get_loc() <= high
            hidden |= {tick.label1, tick.label2} if outside else set()
    texts = figure.findobj(Text)
    return [t for t in texts if t.get_text().strip() and t.get_visible() and t not in hidden]


def test_options_reach_the_picture(folder, capsys, figures):
    words = ["bias", "--heads", 3, "--length", 7, "--encodings", "alibi", "t5"]
    assert run(capsys, "plot", *words, "--png", "b.svg")[0] == 0
    assert "<svg" in (folder / "b.svg").read_text()
    panels = {axes.get_title(loc="left"): axes.lines for axes in figures[0].axes}
    assert {name: [len(line.get_xdata()) for line in lines] for name, lines in panels.items()} == {
        "alibi": [7] * 3, "t5": [7] * 3
    }  # fmt: skip


def test_a_wavelet_of_ones_own(figures, folder, capsys, monkeypatch):
    forget_registrations(monkeypatch)
    code = "import numpy as np, wavepe\nwavepe.register_wavelet('own', lambda u: np.cos(u) / 2)\n"
    (folder / "own.py").write_text(code)
    words = ["table", "--encodings", "wavelet:kind=own,scales=2", "--import", "own.py", "--dim", 4]
    assert run(capsys, "plot", *words, "--length", 5)[0] == 0
    shift, scale = np.array([0, 1, 0, 1]), np.array([1, 1, 2, 2])
    wanted = np.cos((np.arange(5)[:, None] - shift) / scale) / 2
    assert_within(figures[0].axes[0].images[0].get_array(), wanted, 1e-7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tables"], "invalid choice: 'tables', did you mean 'table'?"),
        (["bias", "--dim", "8"], "--dim: bias takes --encodings, --heads, --length"),
        (["table", "--encodings", "alibi"], "needs a relative encoding, got the encoding alibi"),
        (["table", "--encodings", "wavelet", "shaw"], "encodings must hold one spec, got 2"),
        (["table", "--dim", "7"], "head size 7 is not divisible by 8 scales"),
        (["bias", "--length", "1"], "length must be at least 2, got 1"),
        (["bias", "--length", "99999999"], "length must be at most 65536 for a picture"),
        (["bias", "--encodings", *["alibi"] * 7], "must hold 1 to 6 specs, got 7"),
        (["bias", "--encodings", "t5:buckets=1e400"], "buckets"),
        (["table", "--png", "no/such/x.png"], "--png no/such/x.png: No such file"),
        (["table", "--png", "x.jpg"], "--png x.jpg: needs a name that ends in .png"),
        (["table", "--import", "none.py"], "--import none.py: no such file"),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_leave_nothing(words, message, folder, capsys):
    (folder / "file").write_text("kept")
    assert message in refused(capsys, "plot", *words)
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("file", "kept")]


def test_without_matplotlib(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "wavepe plot needs matplotlib: pip install" in refused(capsys, "plot", "table", code=1)
    assert list(folder.iterdir()) == []


def test_needs_numpy_and_matplotlib_alone():
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'transformers', 'rich'))\n"
        "from wavepe.cli import main; sys.exit(main(['plot', 'table']))"
    )
    assert output("-c", code) == "picture: table.png\n"


# ------------------------------------------------------------------ the numbers


def test_wavelets_are_those_of_the_formula(png):
    specs = [f"wavelet:kind={kind},scales=3,min_scale=2" for kind in oracle.KINDS]
    drawn = plots.wavelets(png, encodings=specs, dim=12, length=9)
    t = np.arange(-9, 10)
    assert np.array_equal(drawn["distance"], t)
    rows = [(row["encoding"], row["scale"]) for row in drawn["scales"]]
    assert [scale for _, scale in rows] == [2, 4, 8] * 4
    for row, kind in zip(drawn["scales"], np.repeat(oracle.KINDS, 3), strict=True):
        assert f"kind={kind}," in row["encoding"] or kind == "ricker"
        t_signed = -t if kind == "haar" else t
        assert_within(row["p"], oracle.psi(kind, t_signed, row["scale"], 0.0), 1e-6)
    sides = [(row["mirrored"], row["shift"]) for row in drawn["shifts"]]
    assert sides == [(mirrored, b) for mirrored in (False, True) for b in range(4)]
    for row in drawn["shifts"]:
        wanted = oracle.psi("ricker", -t if row["mirrored"] else t, 4.0, row["shift"])
        assert_within(row["p"], wanted, 1e-6)


def test_repeated_columns_are_drawn_once(png):
    drawn = plots.wavelets(png, encodings="wavelet:fixed_scale=true", length=9)
    assert [row["scale"] for row in drawn["scales"]] == [1]
    assert [row["shift"] for row in drawn["shifts"]] == [0, 2, 5, 7] * 2


@pytest.mark.parametrize("spec", ["wavelet:scales=2", "wavelet:scales=2,rank=4", "shaw:clip=3"])
def test_squares_are_the_table_by_query_and_key(spec, png):
    drawn = plots.table(png, encodings=spec, dim=6, length=10)
    if spec.startswith("wavelet"):
        wanted = oracle.wavelet_table(10, *oracle.wavelet_grid(4 if "rank" in spec else 6, [1, 2]))
    else:  # [S] begins as sine waves of the distance, which is clipped
        wanted = oracle.sinusoidal(np.minimum(np.arange(10), 3), 6)
    assert_within(drawn["p"], wanted, 1e-6)
    middles = [0, 2, 3] if "rank" in spec else [1, 3, 5]
    assert [square["column"] for square in drawn["squares"]] == middles
    for square in drawn["squares"]:
        for i, j in np.ndindex(10, 10):
            value = square["bias"][i, j]
            if j > i:
                assert math.isnan(value)
            else:
                assert abs(value - wanted[i - j, square["column"]]) < 1e-6


def test_biases_by_head(png):
    specs = ["alibi", "kerple", "sandwich:dim=16", "t5"]
    panels = plots.bias(png, encodings=specs, heads=6, length=9)["panels"]
    biases = {panel["encoding"]: panel["bias"] for panel in panels}
    delta = np.arange(9)
    assert_within(biases["alibi"], -oracle.alibi_slopes(6)[:, None] * delta, 1e-15)
    assert_within(biases["sandwich:dim=16"], oracle.sandwich(6, delta, 16), 1e-13)
    assert not biases["t5"].any()
    initial = wavepe.encoding("kerple").parameters(8, 6)
    r1, r2 = np.exp(initial["log_r1"]), np.exp(initial["log_r2"])
    assert_within(biases["kerple"], oracle.kerple("log", r1, r2, delta), 1e-14)


def test_shares_are_told_with_those_of_the_seeds(figures):
    values = {"rope": [[0.5, 1.0], [0.254, 0.251]], "wavelet:scales=6,biases=true": [[1.0], [0.3]]}
    plots.accuracy_grid(values, [8, 16], "a.png", train_length=8, title="words " * 20)
    plots.needle_grid([[0.0, 0.5]], "b.png", lengths=[8], depths=[0.25, 1], title="$x")
    texts = [[text.get_text() for text in figure.axes[0].texts] for figure in figures]
    assert texts == [["75\n50 to 100", "25", "100", "30"], ["0", "50"]]
    for figure in figures:
        assert_texts_apart(figure)
    with pytest.raises(ValueError, match="must hold shares for each of the 3 lengths"):
        plots.accuracy_grid(values, [8, 16, 32], "a.png", train_length=8)


@pytest.mark.parametrize("part", ["color", "marker"])
def test_an_encoding_has_one_look_in_every_picture(part):
    def lines(specs):
        return {spec: look[part] for spec, look in zip(specs, line_looks(specs), strict=True)}

    one = lines(["rope", "alibi", "wavelet+kerple", "rope@::2+none@1::2"])
    other = lines(["wavelet:scales=6+kerple", "none", "rope"])
    assert one["rope"] == other["rope"]
    assert one["wavelet+kerple"] == other["wavelet:scales=6+kerple"]
    assert one["rope@::2+none@1::2"] == lines(["rope", "rope:theta=9"])["rope:theta=9"]
    rows = ["rope", "rope/rope:type=yarn,factor=scaled", "rope:theta=128", "none", "mine"]
    assert len(set(lines(rows).values())) == len(rows) or part == "marker"
    assert lines(["none -> rope:theta=128"])["none -> rope:theta=128"] == one["rope"]


# ------------------------------------------------------------------ perplexity by length

RUNS = [{"encoding": "rope", "seed": 0, "perplexity": {"8": 3.0}}]


@pytest.mark.parametrize(
    ("runs", "options", "error", "words"),
    [
        (3, {}, TypeError, "runs must be a list of mappings, got int"),
        ([], {}, ValueError, "at least one run"),
        (RUNS, {"train_length": None}, TypeError, "train_length must be an integer, got None"),
        (RUNS, {"train_length": 0}, ValueError, "train_length must be at least 1, got 0"),
    ],
)
def test_runs_that_cannot_be_drawn(runs, options, error, words):
    with pytest.raises(error, match=words):
        plots.perplexity_by_length(runs, "none.png", **{"train_length": 8, **options})


def drawn(figures, perplexity, *specs):
    """The figure that was saved, laid out."""
    runs = [{"encoding": spec, "seed": 0, "perplexity": perplexity} for spec in specs]
    plots.perplexity_by_length(runs, "drawn.png", train_length=8)
    (figure,) = figures
    figure.draw_without_rendering()  # sizes in the figure's own dots, not the file's
    return figure


LONG = ["rope:type=longrope,factors=" + "+".join(f"{i}.{k}" for i in range(48)) for k in range(9)]


@pytest.mark.parametrize(
    "specs", [["none", LONG[0]], [*LONG[:4], *"abcd"], [*LONG, *"abcdefghijk"]]
)
def test_long_specs_leave_the_plot_its_room(figures, specs):
    figure = drawn(figures, {"8": 3.0, "16": 4.0}, *specs)
    axes, (legend,) = figure.axes[0], figure.legends
    assert axes.bbox.width > 0.55 * figure.bbox.width
    assert axes.bbox.height > 3 * figure.dpi
    box = legend.get_window_extent()
    assert min(box.x0, box.y0) >= 0
    assert box.x1 <= figure.bbox.x1
    assert box.y1 < axes.bbox.y0


def test_lengths_that_lie_close_are_readable(figures):
    axes = drawn(figures, {str(8 * i): 3.0 for i in range(1, 33)}, "none").axes[0]
    labels = [label for label in axes.get_xticklabels() if label.get_text()]
    assert labels[0].get_text() == "8"
    assert len(labels) > 5
    boxes = [label.get_window_extent() for label in labels]
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


def test_a_name_is_no_formula(figures):
    drawn(figures, {"8": 3.0}, "$\\frac$")
