"""docs/reference/encodings.md: each cell of its table of properties is true, no option missing."""

import dataclasses
import functools
import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
import wavepe
from processes import output
from wavepe.encodings import known_encodings

PAGE = (Path(__file__).parent.parent / "docs" / "reference" / "encodings.md").read_text("utf-8")
TRAINED = 128
# They act on the call of attention, and have no values to look at.
IN_CALL = {"relative", "fox", "pope", "xpos", "sink", "window", "temperature"}


def rows(heading):
    """The table whose header starts with `heading`, as lists of cells."""
    start = f"| {heading} |"
    assert start in PAGE, f"docs/reference/encodings.md: add a table that begins {start}"
    lines = PAGE[PAGE.index(start) :].split("\n\n")[0].splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line
    ]


def cells():
    (_, *properties), *body = rows("encoding")
    for name, *values in body:
        for prop, value in zip(properties, values, strict=True):
            yield pytest.param(name.strip("`"), prop, value, id=f"{name.strip('`')}-{prop}")


def own_encodings():
    """The encodings of the package, without those that other tests have registered."""
    found = {name: type(wavepe.encoding(name)) for name in known_encodings()}
    return {name: cls for name, cls in found.items() if cls.__module__.startswith("wavepe.")}


def trained_table(encoding, length, dim, heads=2):
    """The rows of all heads side by side, for parameters that are not the initial ones; of a bias
    the numbers of all heads."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    parameters = {
        name: torch.from_numpy(value + rng.normal(size=value.shape))
        for name, value in encoding.parameters(dim, heads).items()
    }
    if "bias" in encoding.terms:
        bias, first, beyond = encoding.learned_bias(length, parameters)
        p = bias.T
    else:
        p, first, beyond = encoding.learned_table(length, parameters)
    assert first == 0
    p = p.numpy().astype(np.float32)  # equal bits, whatever product of matrices made them
    rows = np.concatenate(list(p), axis=-1) if p.ndim == 3 else p
    missing = max(length - len(rows), 0)
    return np.pad(rows, ((0, missing), (0, 0)), "edge" if beyond == "edge" else "constant")


def values(encoding, positions, length, dim=64):
    """Return the numbers at these positions or distances, (n, components)."""
    positions = np.asarray(positions)
    if encoding.learned:
        return trained_table(encoding, length, dim)[positions]
    lengths = {"length": length, "trained_length": TRAINED}
    if encoding.adds:
        return encoding.absolute(positions, dim, **lengths)
    if encoding.rotates:
        return np.concatenate(encoding.rope_table(positions, dim, **lengths), axis=-1)
    if "table" in encoding.terms:
        return encoding.table(length, dim)[0][positions]
    if "slopes" in encoding.terms:
        return positions[:, None] * encoding.slopes(8)
    if "bias" in encoding.terms:
        return encoding.bias(length, 8)[0].T[positions]
    return np.empty((len(positions), 0))


def all_differ(array):
    return len({row.tobytes() for row in array}) == len(array)


def unique(encoding):
    short, long = (values(encoding, np.arange(n), n) for n in (256, 512))
    return all_differ(long) and np.array_equal(short, long[:256])


def bounded(encoding):
    if {"table", "bias"} & {*encoding.terms}:
        everything = values(encoding, np.arange(2**17), 2**17, dim=8)
    else:
        powers = 2 ** np.arange(31)
        far = np.unique([*range(2048), *powers, *(powers - 1)])
        everything = values(encoding, far, 2**31)
    return bool((np.abs(everything) <= 1).all())


def linear(encoding):
    """Return whether the best matrix for a shift is exact, by its residual over the change."""
    f = values(encoding, np.arange(256), 512, dim=8).astype(np.float64)
    residuals = []
    for k in (1, 7):
        before, after = f[:-k], f[k:]
        matrix = np.linalg.lstsq(before, after, rcond=None)[0]
        change = np.abs(after - before).max(initial=0)
        residuals.append(np.abs(before @ matrix - after).max(initial=0) / (change or 1))
    assert max(residuals) < 1e-4 or min(residuals) > 1e-2, f"neither exact nor far off: {residuals}"
    return max(residuals) < 1e-4


def longer(encoding):
    trained = values(encoding, np.arange(TRAINED), TRAINED)
    beyond = values(encoding, np.arange(4 * TRAINED), 4 * TRAINED)
    assert np.isfinite(beyond).all()
    return np.array_equal(beyond[:TRAINED], trained)


OTHER_PROCESS = """
import sys, wavepe
sys.path.insert(0, sys.argv[1])
from test_encodings_properties import digest
print(*(digest(wavepe.encoding(name)) for name in sys.argv[2:]))
"""


def digest(encoding):
    return hashlib.sha256(values(encoding, np.arange(300), 300).tobytes()).hexdigest()


@functools.cache
def digests_of_another_process():
    names = {name for name in own_encodings() if not wavepe.encoding(name).learned} - IN_CALL
    run = output("-c", OTHER_PROCESS, Path(__file__).parent, *names)
    return dict(zip(names, run.split(), strict=True))


def deterministic(encoding):
    if encoding.learned:
        return False
    other = digests_of_another_process()[encoding.name]
    return digest(type(encoding).from_dict(encoding.to_dict())) == digest(encoding) == other


def in_two_dimensions(encoding):
    """Each axis has half of the components of one head; where there is only one, it cannot."""
    row, column = np.divmod(np.arange(256), 16)
    of_head = bool({"slopes", "bias"} & {*encoding.terms})
    components = 1 if of_head else values(encoding, [0], 16).shape[1]
    if components < 2:
        return False
    if encoding.rotates:
        spectrum, _ = encoding.frequencies(32)
        places, both = np.stack([row, column], -1), np.tile(spectrum, 2)
        grid = np.concatenate(wavepe.rope_table(places, both, sections=[16, 16]), axis=-1)
        alone = values(encoding, row, 16, dim=32)
        assert np.array_equal(grid[:, :16], alone[:, :16])
    else:
        grid = np.concatenate([values(encoding, axis, 16, dim=32) for axis in (row, column)], -1)
    return all_differ(grid)


def relative(encoding):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import hf_model
    import torch

    model, ids = hf_model.patched_tiny(encoding), hf_model.tokens(2, 16)
    shifted = torch.arange(16)[None] + 7
    got = hf_model.logits(model, ids, use_cache=False)
    moved = hf_model.logits(model, ids, use_cache=False, position_ids=shifted)
    same = hf_model.close(moved, got, 2e-5)
    assert same or not hf_model.close(moved, got, 1e-2), "neither equal nor far off"
    return same


PROPERTIES = {
    "unique": unique, "bounded": bounded, "linear in the shift": linear,
    "longer than trained": longer, "deterministic": deterministic,
    "extends to n-D": in_two_dimensions, "relative": relative,
}  # fmt: skip


@pytest.mark.parametrize(("name", "prop", "cell"), list(cells()))
def test_cell(name, prop, cell):
    assert cell == ("yes" if PROPERTIES[prop](wavepe.encoding(name)) else "no")


def assert_all_named(heading, body, others=()):
    named = sorted([*others, *(row[0].strip("`") for row in body)])
    known = sorted(own_encodings())
    assert named == known, (
        f"docs/reference/encodings.md, the table that begins | {heading} |, needs one row for each "
        "encoding: "
        f"add {set(known) - set(named)}, remove {set(named) - set(known)}"
    )


def test_the_table_is_whole():
    header, *body = rows("encoding")
    assert header[1:] == list(PROPERTIES)
    assert_all_named("encoding", body, IN_CALL)
    assert {len(row) for row in body} == {len(header)}
    for prop in PROPERTIES:
        assert f"- **{prop}**:" in PAGE, "defined below the table"


def test_every_encoding_and_option_is_on_the_page():
    assert_all_named("spec", rows("spec")[1:])
    for name, cls in own_encodings().items():
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        table = rows(f"`{name}` option")[1:] if defaults else []
        named = [(re.findall(r"`(\w+)`", keys), told) for keys, told, _ in table]
        assert sorted(key for keys, _ in named for key in keys) == sorted(defaults), (
            f"docs/reference/encodings.md, options of {name}"
        )
        for (key, *others), told in named:
            if not others and defaults[key] is not None:  # these are told in words
                written = wavepe.common.spec.write_value(defaults[key])
                assert told.strip("`") == written, (name, key)


def test_every_encoding_is_run_in_models():
    from encoding_cases import CONSTANT, IN_CALL, LEARNED  # deterministic() does without torch

    for name in own_encodings():
        specs = {**(LEARNED if wavepe.encoding(name).learned else CONSTANT), **IN_CALL}
        assert any(spec.partition(":")[0] == name for spec in specs), (
            f"tests/encoding_cases.py: add a row of {name!r} and its formula to CONSTANT, LEARNED "
            "or IN_CALL, which the tests of encodings, wavepe.nn, wavepe.hf and wavepe.fairseq run"
        )
