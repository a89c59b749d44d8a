"""docs/guides/choose.md: the figures that its table takes from kept results."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")


from benchmarks import compare_kept
from benchmarks.command import RESULTS, Missing
from docs.writers import choose


def terms(variant, **over_plain):
    rows = [
        {"name": name, "variant": variant, "over_plain": {"forward": 9.0, "with gradients": value}}
        for name, value in over_plain.items()
    ]
    rows += [row | {"variant": "portable", "over_plain": {"forward": 99.0}} for row in rows]
    return json.dumps({"environment": {"variant": variant}, "tables": {"nn.Attention": rows}})


def test_a_price_is_the_range_over_machines(tmp_path):
    (tmp_path / RESULTS).mkdir(parents=True)
    (tmp_path / RESULTS / "attention-terms-a.json").write_text(terms("avx2", wavelet=1.25, fox=2.0))
    (tmp_path / RESULTS / "attention-terms-b.json").write_text(terms("avx512", wavelet=1.125))
    assert "takes 1.12 to 1.25 times" in choose.price(tmp_path, "wavelet")
    assert "takes 2.00 times" in choose.price(tmp_path, "fox")
    with pytest.raises(Missing, match="pope"):
        choose.price(tmp_path, "pope")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("alibi", 0),
        ("wavelet+alibi", 0),
        ("kerple", 64),
        ("wavelet:biases=true,projection=true+kerple", 64 + 2 * 32 * 64 + 32 * 64 * 64),
    ],
)
def test_what_an_encoding_learns_is_counted(spec, expected):
    assert choose.learned(spec) == expected


def test_a_mean_is_over_the_seeds_at_a_multiple_of_the_length(tmp_path):
    (tmp_path / compare_kept.KEPT).mkdir(parents=True)
    runs = [
        {"encoding": name, "perplexity": {"16": 9.0, "32": value}}
        for name, value in (("a", 2.0), ("b", 7.0), ("a", 3.0))
    ]
    kept = {"train_length": 16, "runs": runs}
    (tmp_path / compare_kept.KEPT / "x.json").write_text(json.dumps(kept))
    mean = choose.means(tmp_path, "x")
    assert (mean("a", 2), mean("b", 2), mean("a", 1)) == ("2.50", "7.00", "9.00")
