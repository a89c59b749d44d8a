"""The check of sentences and names that `make lint` runs: what it refuses, and where it looks."""

import pytest

from docs import sentences

RULES = (*sentences.BEGINNINGS, *sentences.PHRASES)
TEXTS = {
    ".py": '"""{}"""', ".c": "// {}", ".h": "/* {} */", ".md": "# Page\n\n{}",
}  # fmt: skip


@pytest.fixture
def faults(tmp_path):
    """Return the faults of a file, by line."""

    def read(suffix, text):
        path = tmp_path / f"file{suffix}"
        path.write_text(text)
        return [(fault.line, fault.text) for fault in sentences.faults_of(path)]

    return read


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.example)
def test_each_rule_refuses_its_example(rule, faults):
    for suffix, text in TEXTS.items():
        if suffix != ".md" or rule in sentences.PHRASES:  # a page may ask "What if ...?"
            assert faults(suffix, text.format(rule.example)), suffix


@pytest.mark.parametrize(
    "text",
    [
        "What is it?",
        "Of course not.",
        "There is no cache, and it is no longer kept.",
        "A call makes use of both, and makes a copy of x.",
        "Return `what is none`.",
    ],
)
def test_good_sentences_pass(text, faults):
    for suffix, whole in TEXTS.items():
        assert not faults(suffix, whole.format(text))


def test_lines_are_those_of_the_words(faults):
    comments = (
        "x = 1  # fine\n# A long comment,\n# if there\n# is none\n\n# What else\ny = '# What'"
    )
    assert faults(".py", comments) == [(4, "is none"), (6, "What else")]
    assert faults(".md", "a\n\n```\nis none\n```\n\nif there\nis none") == [(8, "is none")]


def test_names_are_counted_where_they_are_bound(tmp_path, capsys):
    path = tmp_path / "file.py"
    path.write_text("def f(given):\n    for found in given:\n        own.x = found\n")
    assert sentences.main([str(path), "--words"]) == 1
    assert "2 " in capsys.readouterr().out.splitlines()[-1]
    assert sentences.main([str(path)]) == 0
