"""docs/guides/choose.md: which encoding to take, with figures from kept results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import NamedTuple

import wavepe
from wavepe.encodings.methods import initial_parameters

from benchmarks import real_model
from benchmarks.command import RESULTS, Missing
from benchmarks.real_model import TRAINED_LENGTH

from .adapt import farthest, largest, same_training, untrained
from .claims import BANK, BEST, LARGE_BEST, LARGE_W, W
from .pages import kept, kept_results, wrapped
from .runs import comparison
from .speed import DECODING_LONG

PAGE = Path("docs", "guides", "choose.md")
YARN = "rope/rope:type=yarn,factor=scaled"
SELF_EXTEND = "rope/rope:self_extend=32,neighbors=64"
RAISED = "rope:theta=10000,inference_theta=40000"
HEAD_DIM, HEADS = 64, 32  # of the model whose parameters are counted


class Case(NamedTuple):
    """A situation and the encoding for it, in Markdown."""

    have: str
    take: str
    price: str
    evidence: str
    loses: str


def blocks(root: Path) -> dict[str, str]:
    return {"choice": "\n\n".join(map(section, cases(root)))}


def section(case: Case) -> str:
    """Return a case as a section, which a phone shows as well as a wide screen."""
    parts = {"Price": case.price, "Evidence": case.evidence, "Drawbacks": case.loses}
    lines = [wrapped(f"- **{name}**: {text}.", "  ", 118) for name, text in parts.items()]
    heading = f"## {case.have[0].upper()}{case.have[1:]}"
    return "\n".join([heading, "", f"**Use** {case.take}.", "", *lines])


def means(root: Path, name: str, *keys: str) -> Callable[[str, int], str]:
    """Return a function: row, multiple of the trained length -> the mean over seeds.

    It is of the perplexity, or of what `keys` lead to in a run.
    """
    results = comparison(root, name)

    def mean(row: str, factor: int) -> str:
        length = str(results["train_length"] * factor)
        runs = [run for run in results["runs"] if run["encoding"] == row]
        figures = [reduce(getitem, keys or ("perplexity",), run)[length] for run in runs]
        return f"{statistics.fmean(figures):.2f}"

    return mean


def learned(spec: str) -> int:
    """Return how many numbers one set of an encoding's parameters has."""
    encoding = wavepe.encoding(spec)
    if not encoding.learns:
        return 0
    parameters = initial_parameters(encoding, HEAD_DIM, HEADS, HEAD_DIM * HEADS)
    return sum(value.size for value in parameters.values())


def price(root: Path, spec: str) -> str:
    """Return the time of attention, with gradients if it is trained, over that without positions.

    It is the range over the machines that were measured.
    """
    ratios = []
    for results in kept_results(root, "attention-terms"):
        fastest = results["environment"]["variant"]
        for row in results["tables"]["nn.Attention"]:
            if (row["name"], row["variant"]) == (spec, fastest):
                ratios.append(list(row["over_plain"].values())[-1])
    if not ratios:
        raise Missing(f"no attention-terms-*.json in {RESULTS} has {spec}")
    return f"attention takes {spread(ratios, 2)} times as long as without positions"


def spread(ratios: Sequence[float], digits: int) -> str:
    """Return the range of ratios, or one number if they are equal in so many digits."""
    low, high = f"{min(ratios):.{digits}f}", f"{max(ratios):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def decoding(root: Path, spec: str) -> str:
    """Return the time of a decoding step over that of the stock model, the range measured."""
    ratios = [
        row["ratio"][spec]
        for results in kept_results(root, "hf-decoding")
        for row in results["rows"]
        if spec in row["ratio"]
    ]
    if not ratios:
        raise Missing(f"no hf-decoding*.json in {RESULTS} has {spec}")
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def decoding_with_far_keys(root: Path) -> str:
    """Return the time of a decoding step with Self-Extend over that with YaRN."""
    results = kept(root, DECODING_LONG)
    far, yarn = real_model.SELF_EXTEND, real_model.YARN
    ratios = [row["ratio"][far] / row["ratio"][yarn] for row in results["rows"]]
    after = f"a decoding step after {results['cached']:,} tokens"
    return f"{after} takes {spread(ratios, 1)} times as long as YaRN's"


def cases(root: Path) -> list[Case]:
    """Return the rows of the table."""
    return [*checkpoints(root), *new_models(root)]


def checkpoints(root: Path) -> list[Case]:
    """Return the rows of those who have a model that was trained with RoPE."""
    recent, theta, tuned, large = (
        means(root, name) for name in ("recent", "theta", "finetune", "larger-prose")
    )
    before = means(root, "finetune", "before", "perplexity")
    tuned_yarn, tuned_base = "rope/rope:type=yarn,factor=4", "rope/rope:theta=40000"
    real = largest(root)
    model = real["model"].removesuffix("-Instruct")
    arms = {row["arm"]: row["perplexity"] for row in real["rows"]}
    full, twice, four = (str(TRAINED_LENGTH * factor) for factor in (1, 2, 4))
    worse = [arms["yarn"][n] / arms["stock"][n] - 1 for n in arms["stock"] if int(n) <= int(full)]
    needle = means(root, "tasks-needle", "accuracy")
    small_price = float(before(tuned_yarn, 1)) / float(before("rope", 1)) - 1
    lost = {
        arm: arms[arm][four] / arms[baseline][full] - 1
        for arm, baseline in (("plain", "control"), ("yarn", "stock"))
    }
    adapted = "rope:fraction=0.166667+wavelet:biases=true,projection=true"  # by `auto`
    (seconds,) = (row["seconds"] for row in real["rows"] if row["arm"] == "plain")
    return [
        Case(
            "a checkpoint with RoPE, no fine-tuning, texts F times as long, F up to 4",
            "`rope:type=yarn,factor=F`, or [`rope_parameters` in "
            "config.json](longer-context.md#yarn-in-a-stock-engine)",
            f"with F = 4 perplexity is {min(worse):.0%} to {max(worse):.0%} higher within the "
            f"trained length ({model}), in small models {small_price:.0%}",
            f"{model} at twice its trained length: {arms['yarn'][twice]:.2f}, stock "
            f"{arms['stock'][twice]:.2f}. Small models at 2 and 4 times: {recent(YARN, 2)} and "
            f"{recent(YARN, 4)}, plain RoPE {recent('rope', 2)} and {recent('rope', 4)}; larger "
            f"ones on prose: {large(YARN, 2)} and {large(YARN, 4)}, plain RoPE {large('rope', 2)} "
            f"and {large('rope', 4)}",
            "not for models with a scaling of their own, such as Llama 3.1. Self-Extend, the next "
            "choice, is better wherever both were measured (in small models "
            f"{recent(SELF_EXTEND, 2)} and {recent(SELF_EXTEND, 4)}), but stock programs do not "
            "run it. A base four times as large is better at twice the length "
            f"({theta(RAISED, 2)}) and worse from 4 times on ({theta(RAISED, 4)})",
        ),
        Case(
            "a checkpoint with RoPE, no fine-tuning, texts up to 8 times as long",
            "`rope:self_extend=32,neighbors=N`, N half the trained length",
            f"{price(root, 'rope:self_extend=8,neighbors=512')}, because it is called twice; "
            f"{decoding_with_far_keys(root)}",
            f"small models at 8 and 16 times: {recent(SELF_EXTEND, 8)} and "
            f"{recent(SELF_EXTEND, 16)}, YaRN {recent(YARN, 8)} and {recent(YARN, 16)}. "
            f"{untrained(root, 2 * TRAINED_LENGTH)}",
            f"in texts 8 times as long small models find {needle(SELF_EXTEND, 8)} of the hidden "
            f"facts, and {needle(SELF_EXTEND, 16)} at 16 times. No real model was measured beyond "
            "twice its trained length, and none of our larger models, in which YaRN only rises "
            f"from {large(YARN, 1)} to {large(YARN, 8)} at 8 times",
        ),
        Case(
            "a checkpoint with RoPE, fine-tuning on texts of the new length",
            "YaRN, or a larger base (`set_theta`)",
            "fine-tuning: in our small models a tenth of the steps of their training",
            f"small models at 4 times, fine-tuned there: YaRN {tuned(tuned_yarn, 4)}, larger base "
            f"{tuned(tuned_base, 4)}, plain RoPE {tuned('rope', 4)}",
            f"both get worse again beyond the new length ({tuned(tuned_yarn, 8)} and "
            f"{tuned(tuned_base, 8)} at twice that length) and on short texts "
            f"({tuned(tuned_yarn, 1)}, up from {recent('rope', 1)}); Self-Extend reaches "
            f"{recent(SELF_EXTEND, 4)} without training",
        ),
        Case(
            "a checkpoint with RoPE, fine-tuned up to its trained length, run on longer texts",
            "YaRN, as above; and [`wavepe adapt`](adapt.md) SOURCE TARGET `wavelet+kerple`, to "
            "compare the two",
            f"with `wavelet`, by the recipe `plain`, {model} was fine-tuned on "
            f"{real['settings']['tokens']:,} tokens ({seconds:.0f} s on an "
            f"{real['environment']['gpu'].split()[-1]}). Published conversions needed about 1% of "
            "the pre-training tokens for a full recovery: a billion out of 100 billion",
            f"{model} with `wavelet` at twice its trained length: {arms['plain'][twice]:.2f}; the "
            f"stock model after the same fine-tuning {arms['control'][twice]:.2f}. Small models at "
            f"16 times, `wavelet` and `wavelet+kerple`: {farthest(root, adapted)} and "
            f"{farthest(root, f'{adapted}+kerple')}",
            f"the swap is {arms['plain'][full] / arms['control'][full] - 1:.0%} worse than the "
            "fine-tuned stock model at the trained length. At 4 times that length its perplexity "
            f"is {lost['plain']:.0%} higher than that of the fine-tuned stock model at the trained "
            f"length; untrained YaRN is only {lost['yarn']:.0%} above the untouched stock model. "
            f"{same_training(root, 2 * TRAINED_LENGTH)}. Retrieval recovers later than perplexity",
        ),
    ]


def new_models(root: Path) -> list[Case]:
    """Return the rows of those who train a model from the start."""
    small, recent, large, largest_new = (
        means(root, name) for name in ("combinations", "recent", "larger-prose", "larger-11m")
    )
    needle, keys, chains = (
        means(root, f"tasks-{task}", "accuracy") for task in ("needle", "keys", "tracking")
    )
    best, xl = LARGE_BEST, "transformer_xl"  # with eight scales, as users of larger models write it
    return [
        Case(
            "a new model, texts within the trained length",
            f"`{best}`",
            f"{price(root, best)}; in a model with {HEADS} heads of size {HEAD_DIM}, each layer "
            f"learns {learned(best):,} numbers; with `shared=true` all layers together do",
            f"small models: {small(BEST, 1)}, Transformer-XL {small(xl, 1)}, RoPE "
            f"{small('rope', 1)}; larger ones on prose: {large(LARGE_BEST, 1)}, {large(xl, 1)}, "
            f"{large('rope', 1)}",
            f"other programs do not run it; `{BANK}` has {recent(BANK, 1)} but breaks on "
            "longer texts",
        ),
        Case(
            "a new model, texts up to 16 times as long",
            f"`{best}`",
            "as above",
            f"small models at 16 times: {small(BEST, 16)}, Transformer-XL {small(xl, 16)}, KERPLE "
            f"alone {recent('kerple', 16)}, wavelets alone {small(W, 16)}; larger ones on prose: "
            f"{large(LARGE_BEST, 16)}, {large(xl, 16)}, {large('kerple', 16)}, "
            f"{large(LARGE_W, 16)}",
            f"Transformer-XL with KERPLE reaches {small(f'{xl}+kerple', 16)} in the small models "
            f"and {large(f'{xl}+kerple', 16)} in the larger ones; with 11 million parameters and "
            f"one seed it reaches {largest_new(f'{xl}+kerple', 16)}, and these wavelets "
            f"{largest_new(LARGE_BEST, 16)}; with Transformer-XL alone "
            f"{price(root, xl)}, and {learned(xl):,} numbers are learned for "
            f"all layers of {HEADS} heads of {HEAD_DIM}",
        ),
        Case(
            "a new model that must find facts far back",
            f"`{best}`, or for chains of facts RoPE with YaRN",
            "as above",
            f"in texts 16 times as long, one fact is found in {needle(BEST, 16)} of the cases, "
            f"KERPLE alone {needle('kerple', 16)}, Transformer-XL {needle('transformer_xl', 16)}, "
            f"ALiBi {needle('alibi', 16)}, wavelets alone {needle(W, 16)}, YaRN "
            f"{needle(YARN, 16)}; of eight facts the same encodings find "
            + ", ".join(keys(x, 16) for x in (BEST, "kerple", "transformer_xl", "alibi", W, YARN)),
            "one seed of three does not learn the task with eight facts; with KERPLE alone or "
            f"ALiBi every seed does. Chains of facts at 8 times the length: {chains(BEST, 8)}, "
            f"KERPLE alone {chains('kerple', 8)}, Transformer-XL {chains('transformer_xl', 8)}, "
            f"YaRN {chains(YARN, 8)}",
        ),
        Case(
            "a new model, nothing to learn in the encoding",
            "`wavelet+alibi`",
            price(root, "wavelet+alibi"),
            f"small models at 1 and 16 times: {small(f'{W}+alibi', 1)} and "
            f"{small(f'{W}+alibi', 16)}, ALiBi alone {small('alibi', 1)} and {small('alibi', 16)}",
            f"Transformer-XL reaches {small(xl, 1)} and {small(xl, 16)}",
        ),
    ]
