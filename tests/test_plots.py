"""`wavepe plot`: the pictures of encodings, their numbers against the oracle, and its errors."""

import itertools
import json
import math
import sys

import numpy as np
import oracle
import pytest
import wavepe
from cases import assert_within, forget_registrations
from processes import output

pytest.importorskip("matplotlib")

from wavepe.analysis import plots
from wavepe.analysis.plots._figure import line_looks
from wavepe.cli import main
from wavepe.cli.plot import PICTURES

MOST_BYTES = 150_000


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved, laid out."""
    from matplotlib.figure import Figure

    found, save = [], Figure.savefig

    def keep(figure, *args, **options):
        found.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return found


def run(capsys, *words):
    code = main(["plot", *map(str, words)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


# ------------------------------------------------------------------ the command


@pytest.mark.parametrize("name", PICTURES)
def test_each_picture(name, tmp_path, capsys, monkeypatch, figures):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, name, "--json", "numbers.json") == (
        0, f"picture: {name}.png\nnumbers: numbers.json\n", "",
    )  # fmt: skip
    picture = (tmp_path / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < MOST_BYTES
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers.pop("picture") == name
    assert numbers
    assert len(list(tmp_path.iterdir())) == 2
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
    from matplotlib.axis import Axis
    from matplotlib.text import Text

    hidden = set()
    for axis in figure.findobj(Axis):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            outside = not low <= tick.get_loc() <= high
            hidden |= {tick.label1, tick.label2} if outside else set()
    texts = figure.findobj(Text)
    return [t for t in texts if t.get_text().strip() and t.get_visible() and t not in hidden]


def test_all_of_them(tmp_path, capsys):
    out = tmp_path / "a" / "b"
    code, said, err = run(capsys, "all", "--out", out, "--json", tmp_path / "all.json")
    assert (code, err) == (0, "")
    assert {path.name for path in out.iterdir()} == {f"{name}.png" for name in PICTURES}
    assert [line.partition(":")[0] for line in said.splitlines()] == [*PICTURES, "numbers"]
    assert list(json.loads((tmp_path / "all.json").read_text())) == list(PICTURES)


@pytest.mark.parametrize(
    ("spec", "picture"),
    [
        ("wavelet:scales=6", "table"),
        ("wavelet:scales=128+", "table"),
        ("transformer_xl", "table"),
        ("shaw:clip=4", "table"),
        ("sinusoidal:theta=length", "absolute"),
        ("integer", "absolute"),
        ("rope:type=yarn,factor=4", "wavelengths"),
        ("rope:fraction=0.5", "wavelengths"),
        ("rope:fraction=0", "wavelengths"),
        ("alibi", "bias"),
        ("t5", "bias"),
        ("kerple:kind=power", "bias"),
    ],
)
def test_a_spec_in_place_of_a_name(spec, picture, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, spec, "--json", "numbers.json")
    assert (code, err) == (0, "")
    (file,) = tmp_path.glob("*.png")
    assert out.startswith(f"picture: {file.name}\n")
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["picture"] == picture
    shown = next((numbers[key] for key in ("lines", "panels") if key in numbers), [numbers])
    assert [row["encoding"] for row in shown] == [spec]


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_a_mother_wavelet_in_place_of_a_name(kind, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, kind, "--json", "numbers.json")
    assert (code, out) == (0, f"picture: {kind}.png\nnumbers: numbers.json\n")
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    spec = str(wavepe.encoding("wavelet", kind=kind))
    assert {row["encoding"] for row in numbers["scales"]} == {spec}
    assert numbers["picture"] == "wavelets"


def test_options_reach_the_picture(tmp_path, capsys):
    file = tmp_path / "numbers.json"
    words = ["bias", "--heads", 3, "--length", 7, "--encodings", "alibi", "t5"]
    assert run(capsys, *words, "--png", tmp_path / "b.svg", "--json", file)[0] == 0
    assert "<svg" in (tmp_path / "b.svg").read_text()
    panels = json.loads(file.read_text())["panels"]
    assert [(p["encoding"], np.shape(p["bias"])) for p in panels] == [
        ("alibi", (3, 7)), ("t5", (3, 7)),
    ]  # fmt: skip


def test_numbers_go_through_links_and_pipes(tmp_path, capsys):
    kept, link = tmp_path / "kept.json", tmp_path / "link.json"
    link.symlink_to(kept)
    assert run(capsys, "alibi", "--out", tmp_path, "--json", link)[0] == 0
    assert link.is_symlink()
    assert json.loads(kept.read_text())["picture"] == "bias"
    shown = output("-m", "wavepe", "plot", "alibi", "--json", "/dev/stdout", cwd=tmp_path)
    assert json.loads(shown.splitlines()[0]) == json.loads(kept.read_text())


def test_a_wavelet_of_ones_own(tmp_path, capsys, monkeypatch):
    forget_registrations(monkeypatch)
    code = "import numpy as np, wavepe\nwavepe.register_wavelet('own', lambda u: np.cos(u) / 2)\n"
    (tmp_path / "own.py").write_text(code)
    files = ["--png", tmp_path / "own.png", "--json", tmp_path / "own.json"]
    spec = "wavelet:kind=own,scales=2"
    words = [spec, "--import", tmp_path / "own.py", "--dim", 4, "--length", 5]
    assert run(capsys, *words, *files)[0] == 0
    p = json.loads((tmp_path / "own.json").read_text())["p"]
    delta = np.arange(5)[:, None]
    shift, scale = np.array([0, 1, 0, 1]), np.array([1, 1, 2, 2])
    assert_within(p, np.cos((delta - shift) / scale) / 2, 1e-7)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["riker"], "riker: is no picture, encoding or wavelet; pictures: wavelets, table,"),
        (["rope:base=3"], "unknown option 'base' of encoding 'rope'; known: theta,"),
        (["none"], "none: has nothing to draw"),
        ([""], "no picture, encoding or wavelet"),
        (["all", "--dim", "8"], "--dim: transform takes --kind, --length"),
        (["alibi", "--dim", "8"], "--dim: bias, the picture of alibi, takes --encodings"),
        (["alibi", "--encodings", "t5"], "--encodings: alibi names the encoding already"),
        (["table", "--encodings", "alibi"], "needs a relative encoding, got the encoding alibi"),
        (["table", "--encodings", "wavelet", "shaw"], "wavelet shaw: table shows one"),
        (["table", "--dim", "7"], "head size 7 is not divisible by 8 scales"),
        (["decay", "--dim", "7"], "7"),
        (["decay", "--length", "1"], "length must be at least 2, got 1"),
        (["decay", "--length", "99999999"], "length must be at most 65536 for a picture"),
        (["matrices", "--position", "-1"], "position must be at least 0, got -1"),
        (["matrices", "--theta", "nan"], "theta must be finite"),
        (["transform", "--kind", "riker"], "riker"),
        (["bias", "--encodings", *["alibi"] * 7], "must hold 1 to 6 specs, got 7"),
        (["wavelengths", "--encodings", "rope:inference_theta=scaled,theta=1e400"], "theta"),
        (["table", "--png", "no/such/x.png"], "--png no/such/x.png: No such file"),
        (["table", "--png", "x.docx"], "--png x.docx: needs a name that ends in .png"),
        (["table", "--png", "x"], "--png x: needs a name that ends in .png"),
        (["table", "--png", "x.png", "--out", "y"], "--png names one file"),
        (["all", "--png", "x.png"], "--png names one file"),
        (["table", "--json", "."], "--json .: needs a file"),
        (["table", "--json", "no/such/x.json"], "--json no/such/x.json: No such file"),
        (["table", "--json", "x.png", "--png", "x.png"], "--png name the same file, x.png"),
        (["table", "--out", "file"], "--out file: File exists"),
        (["table", "--import", "none.py"], "--import none.py: no such file"),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_leave_nothing(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("wavepe plot: error: ")
    assert said in err
    assert err.count("\n") == 1
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "kept")]


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "table")
    assert (code, out) == (1, "")
    assert err.startswith("wavepe plot: error: wavepe plot needs matplotlib: pip install")
    assert list(tmp_path.iterdir()) == []


def test_needs_numpy_and_matplotlib_alone(tmp_path):
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'transformers', 'rich'))\n"
        "from wavepe.cli import main; sys.exit(main(['plot', 'matrices']))"
    )
    assert output("-c", code, cwd=tmp_path) == "picture: matrices.png\n"


# ------------------------------------------------------------------ the numbers


@pytest.fixture
def png(tmp_path):
    return tmp_path / "picture.png"


def test_wavelets_are_those_of_the_formula(png):
    specs = [f"wavelet:kind={kind},scales=3,min_scale=2" for kind in oracle.KINDS]
    drawn = plots.wavelets(png, encodings=specs, dim=12, length=9)
    t = np.arange(-9, 10)
    assert np.array_equal(drawn["distance"], t)
    found = [(row["encoding"], row["scale"]) for row in drawn["scales"]]
    assert [scale for _, scale in found] == [2, 4, 8] * 4
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


@pytest.mark.parametrize("spec", ["wavelet:scales=2", "shaw:clip=3"])
def test_squares_are_the_table_by_query_and_key(spec, png):
    drawn = plots.table(png, encoding=spec, dim=6, length=10)
    if spec.startswith("wavelet"):
        wanted = oracle.wavelet_table(10, *oracle.wavelet_grid(6, [1, 2]))
    else:  # [S] begins as sine waves of the distance, which is clipped
        wanted = oracle.sinusoidal(np.minimum(np.arange(10), 3), 6)
    assert_within(drawn["p"], wanted, 1e-6)
    assert [square["column"] for square in drawn["squares"]] == [1, 3, 5]
    for square in drawn["squares"]:
        for i, j in np.ndindex(10, 10):
            value = square["bias"][i, j]
            if j > i:
                assert math.isnan(value)
            else:
                assert abs(value - wanted[i - j, square["column"]]) < 1e-6


def test_vectors_of_positions(png):
    drawn = plots.absolute(png, dim=6, length=20)["panels"]
    values = {panel["encoding"]: panel["values"] for panel in drawn}
    m = np.arange(20)
    assert_within(values["sinusoidal"], oracle.sinusoidal(m, 6), 1e-15)
    bits = [[int(bit) for bit in format(number, "06b")] for number in m]
    assert_within(values["binary"], bits, 0)
    assert_within(values["normalised"], np.repeat(m[:, None] / 20, 6, 1), 1e-16)


def test_decay_is_the_mean_cosine(png):
    specs = ["sinusoidal", "rope", "rope:theta=100", "rope:fraction=0.5,interleaved=true"]
    drawn = plots.decay(png, encodings=specs, dim=16, length=50)
    lines = {line["encoding"]: line["product"] for line in drawn["lines"]}
    assert np.array_equal(drawn["distance"], np.arange(50))
    for spec, theta, turning in zip(specs, (1e4, 1e4, 100, 1e4), (8, 8, 8, 4), strict=True):
        inv_freq = oracle.rope_frequencies(16, theta)
        inv_freq[turning:] = 0
        wanted = np.cos(np.arange(50)[:, None] * inv_freq).mean(-1)
        assert_within(lines[spec], wanted, 1e-7)


def test_wavelengths_and_the_predicted_band(png):
    specs = ["rope", "rope:theta=4096", "rope:type=linear,factor=2", "rope:fraction=0.25"]
    drawn = plots.wavelengths(png, encodings=specs, dim=128, length=4096)
    plain = 2 * np.pi / oracle.rope_frequencies(128)
    rows = drawn["lines"]
    assert drawn["trained_length"] == 4096
    assert_within(rows[0]["wavelength"] / plain, np.ones(64), 1e-14)
    assert_within(rows[2]["wavelength"] / (2 * plain), np.ones(64), 1e-14)
    assert_within(rows[3]["wavelength"][:16] / plain[:16], np.ones(16), 1e-14)
    assert np.isinf(rows[3]["wavelength"][16:]).all()
    assert rows[0]["predicted_band"] == pytest.approx(48.7874, abs=5e-5)
    assert rows[1]["predicted_band"] == pytest.approx(64 * math.log(4096 / 3.65721, 4096), abs=1e-4)
    assert (rows[2]["predicted_band"], rows[3]["predicted_band"]) == (None, None)


def test_matrices_block_by_block(png):
    drawn = plots.matrices(png, position=5, dim=6, theta=50.0)
    angles = 5 * oracle.rope_frequencies(6, 50.0)
    assert_within(drawn["wavelets"], drawn["rotation"], 1e-9)
    for i, j in np.ndindex(3, 3):
        c, s = math.cos(angles[i]), math.sin(angles[i])
        block = np.array([[c, -s], [s, c]])
        at = np.s_[2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
        assert_within(drawn["rotation"][at], block * (i == j), 1e-15)
        assert_within(drawn["multiscale"][at], block * (j <= i), 1e-15)


def test_biases_by_head(png):
    specs = ["alibi", "kerple", "sandwich:dim=16", "t5"]
    panels = plots.bias(png, encodings=specs, heads=6, length=9)["panels"]
    found = {panel["encoding"]: panel["bias"] for panel in panels}
    delta = np.arange(9)
    assert_within(found["alibi"], -oracle.alibi_slopes(6)[:, None] * delta, 1e-15)
    assert_within(found["sandwich:dim=16"], oracle.sandwich(6, delta, 16), 1e-13)
    assert not found["t5"].any()
    initial = wavepe.encoding("kerple").parameters(8, 6)
    r1, r2 = np.exp(initial["log_r1"]), np.exp(initial["log_r2"])
    assert_within(found["kerple"], oracle.kerple("log", r1, r2, delta), 1e-14)


def test_the_transform_is_the_sum(png):
    drawn = plots.transform(png, length=16)
    assert_within(drawn["scale"], 2.0 ** (np.arange(9) / 4), 1e-15)
    for row, a in zip(drawn["W"], drawn["scale"], strict=True):
        for b in range(16):
            psi = oracle.psi("ricker", np.arange(16), a, b)
            assert row[b] == pytest.approx(float(psi @ drawn["signal"]) / math.sqrt(a), abs=1e-12)


def test_the_picture_of_two_bumps_is_at_their_places(png):
    drawn = plots.transform(png, length=256)
    scale, at = np.unravel_index(drawn["W"].argmax(), drawn["W"].shape)
    assert abs(at - 0.45 * 256) < 3
    assert 16 <= drawn["scale"][scale] <= 64


def test_an_encoding_has_one_colour_in_every_picture():
    def lines(specs):
        return {spec: look["color"] for spec, look in zip(specs, line_looks(specs), strict=True)}

    one, other = lines(["rope", "alibi", "wavelet"]), lines(["wavelet:scales=6", "none", "rope"])
    assert one["rope"] == other["rope"]
    assert one["wavelet"] == other["wavelet:scales=6"]
    rows = ["rope", "rope/rope:type=yarn,factor=scaled", "rope:theta=128", "none", "mine"]
    assert len(set(lines(rows).values())) == len(rows)
    assert lines(["none -> rope:theta=128"])["none -> rope:theta=128"] == one["rope"]
