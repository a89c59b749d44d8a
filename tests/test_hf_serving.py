"""Serving: continuous batching and the server of transformers, against `generate` alone."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from cases import needs, soon

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

import wavepe.hf
from hf_families import UNROTATED, build, by_turns, stirred
from hf_model import patched_tiny, tiny
from serving_cases import (
    FOLLOW_LENGTH,
    RECOMMENDED,
    SETTINGS_OF_SERVER,
    Server,
    alone,
    batched,
    model_of,
    outputs_of,
    prompts,
    save,
    specs,
    text_of,
)
from transformers.generation.continuous_batching import PagedAttentionCache, RequestState
from wavepe.positions import requests
from wavepe.serving.batching import NOT_CARRIED

from benchmarks import serving

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the largest scale is:UserWarning"),
    pytest.mark.skipif(os.name != "posix", reason="signals"),
]
QUICK = (
    RECOMMENDED,
    FOLLOW_LENGTH[1],
    "rope:theta=100+sink+window:size=4+temperature:floor=3,alpha=0.5",
)
each_family = by_turns(count=1, always=(), more=UNROTATED)


@pytest.mark.parametrize("spec", soon(specs(), *QUICK))
def test_each_request_is_that_of_generate(spec):
    """In one row, in chunks of a prompt, and at the length of each request."""
    model = stirred(patched_tiny(spec))
    assert batched(model, prompts()) == alone(model, prompts())


def test_the_tokens_depend_on_positions():
    """Else the tests above would see nothing."""
    wanted = alone(patched_tiny("none"), prompts())
    for spec in (*QUICK, "rope:theta=20"):
        others = alone(patched_tiny(spec), prompts())
        assert all(x != y for x, y in zip(wanted, others, strict=True)), spec


@each_family
def test_families(family):
    if family in NOT_CARRIED:
        model = build(family)
        reasons = "'kwargs'|'cu_seq_lens_k'|per-layer attribute|Invalid layer type"
        with pytest.raises(Exception, match=reasons):  # a stock model is not carried, either
            batched(model, prompts())
        wavepe.hf.patch(model, "wavelet:scales=4")
        with pytest.raises(
            ValueError, match=f"continuous batching does not take a {family}, stock"
        ):
            batched(model, prompts())
        return
    model, without = (model_of(family, spec) for spec in ("rope+wavelet:scales=4", "none"))
    wanted = alone(model, prompts())
    assert batched(model, prompts()) == wanted != alone(without, prompts())


@pytest.fixture
def matched(monkeypatch):
    """The tokens of prompts that a paged cache had already."""
    counts, search = [], PagedAttentionCache.search_prefix_match

    def counting(self, *args):
        counts.append(search(self, *args))
        return counts[-1]

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", counting)
    return counts


@pytest.mark.parametrize(("spec", "shares"), [(RECOMMENDED, True), (FOLLOW_LENGTH[0], False)])
def test_prefixes_are_shared_if_their_keys_are_those_of_both(spec, shares, matched):
    first = prompts((32,))[0]
    rows = [first + row for row in prompts((2, 30))] + [first[:10]]
    model = patched_tiny(spec)
    options = {"max_requests_per_batch": 1}  # so that each one finds those before it
    assert batched(model, rows, **options) == alone(model, rows)
    assert any(matched) == shares


@pytest.mark.parametrize("spec", [RECOMMENDED, FOLLOW_LENGTH[0]])
def test_a_full_cache_drops_requests_that_begin_again(spec, monkeypatch):
    dropped, begin = [], RequestState.create_equivalent_initial_request
    name = begin.__name__
    monkeypatch.setattr(RequestState, name, lambda self: dropped.append(self) or begin(self))
    model, rows = patched_tiny(spec), prompts((20, 22, 24))
    settings = {"num_blocks": 8, "cpu_offload_space": 0.0}
    assert batched(model, rows, 20, **settings) == alone(model, rows, 20)
    assert dropped


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_request_that_outgrows_the_cache_fails_alone(family):
    """It would end the manager of a stock model; a cache of windows alone holds any request."""
    model, rows = wavepe.hf.patch(build(family), "alibi"), prompts((58, 5, 57))
    outputs = outputs_of(model, rows, 8, num_blocks=8)
    wanted = alone(model, rows, 8)
    if family == "llama":
        assert "58 tokens and 8 new ones do not fit the cache, which holds 64" in outputs[0].error
        outputs, wanted = outputs[1:], wanted[1:]
    assert [output.generated_tokens for output in outputs] == wanted


def test_requests_without_a_limit_end_where_the_cache_is_full():
    """One of these begins again after the other. Keys of the last token are not stored."""
    model, rows = patched_tiny("alibi"), prompts((40, 5))
    wanted = [alone(model, [row], 65 - len(row))[0] for row in rows]
    assert batched(model, rows, None, num_blocks=8, cpu_offload_space=0.0) == wanted


def test_requests_without_a_limit_have_the_length_of_their_prompt():
    model, row = patched_tiny(FOLLOW_LENGTH[0]), prompts((40,))[0]
    wavepe.hf.fix_length(model, 40)
    ids = torch.tensor([row])
    wanted = model.generate(ids, max_new_tokens=25, do_sample=False)[0, 40:].tolist()
    wavepe.hf.fix_length(model, None)
    assert batched(model, [row], None, num_blocks=8) == [wanted]


def test_other_threads_do_not_see_the_requests(monkeypatch):
    """A manager batches in a thread of its own, while others call the same model."""
    monkeypatch.setattr(requests.current, "lengths", [(3, 64)])
    model, ids = patched_tiny(FOLLOW_LENGTH[0]).eval(), torch.arange(3)[None]
    with ThreadPoolExecutor(1) as pool, torch.inference_mode():
        requests.current.lengths = [(3, 64)]  # a pass of this thread would replace them
        got = pool.submit(model.model.rotary_emb, torch.zeros(1), ids).result()
        requests.current.lengths = None
        want = model.model.rotary_emb(torch.zeros(1), ids)
        requests.current.lengths = [(3, 64)]
        of_requests = model.model.rotary_emb(torch.zeros(1), ids)
    assert torch.equal(got[1], want[1])
    assert not torch.equal(got[1], of_requests[1])


def test_a_fixed_length_is_that_of_all_requests():
    model = wavepe.hf.fix_length(patched_tiny(FOLLOW_LENGTH[0]), 100)
    rows = prompts((5, 40))
    ids = [torch.tensor([row]) for row in rows]
    outputs = [model.generate(x, max_new_tokens=8, do_sample=False)[0] for x in ids]
    assert batched(model, rows, 8) == [output[-8:].tolist() for output in outputs]


@pytest.mark.parametrize(
    ("spec", "settings", "words"),
    [
        ("fox", {}, "fox keeps the decay of each token beside its key, and the paged cache"),
        ("alibi", {"default_compile_level": 1}, "takes no CUDA graphs and no compilation"),
        ("rope", {"is_causal": False}, "continuous batching is causal, got config.is_causal=False"),
    ],
)
def test_what_cannot_be_carried_is_refused_at_the_start(spec, settings, words):
    model = patched_tiny(spec)
    if "is_causal" in settings:
        model.config.is_causal = settings.pop("is_causal")
    with pytest.raises(ValueError, match=words):
        batched(model, prompts((5,)), **settings)


def test_a_kept_manager_and_another_encoding():
    model, rows = patched_tiny("alibi"), prompts((5,))
    for _ in range(2):
        outputs_of(model, rows, 2, persistent_manager=True)
    wavepe.hf.patch(wavepe.hf.unpatch(model), "rope")
    for wanted in ("rope", "none"):
        with pytest.raises(ValueError, match=f"filled with alibi, and the model has {wanted} now"):
            outputs_of(model, rows, 2)
        if wanted == "rope":
            wavepe.hf.unpatch(model)
    model.destroy_cached_continuous_batching_manager()
    assert outputs_of(model, rows, 2)[0].error is None


def test_stock_models_are_batched_as_before():
    model, rows = tiny(max_position_embeddings=64), prompts()
    assert batched(model, rows) == alone(model, rows)
    model.set_attn_implementation("wavepe")
    with pytest.raises(ValueError, match="wavepe is not supported for continuous batching"):
        batched(model, rows)


def test_the_module_transformers_has_the_classes():
    assert transformers.WavePELlamaForCausalLM is wavepe.hf.WavePELlamaForCausalLM


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--continuous-batching", *SETTINGS_OF_SERVER)], ids=str)
def test_the_server(words, tmp_path, monkeypatch):
    """A process that imports transformers alone serves folders, and survives its clients."""
    for name in ("fastapi", "uvicorn", "openai"):
        needs(name)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = save(patched_tiny(RECOMMENDED), tmp_path / "model")
    refused = save(patched_tiny("fox"), tmp_path / "fox")
    model = patched_tiny(RECOMMENDED)
    rows = prompts(range(3, 53))
    wanted = list(map(text_of, alone(model, rows)))
    with Server(*words, home=tmp_path) as server:
        assert server.text(folder, rows[0]) == wanted[0]
        assert server.texts(folder, rows) == wanted  # fifty at once
        clients = [server.ask(folder, rows[-1], 400, stream=True) for _ in range(4)]
        for client in clients:  # they hang up after their first bytes
            client.read(10)
            client.close()
        if words:
            with pytest.raises(OSError, match="500"):
                server.text(refused, rows[0])
            assert server.text(folder, rows[1]) == wanted[1]
            with pytest.raises(OSError, match="500"):  # more than the whole cache holds
                server.text(folder, 30 * rows[-1])
        assert server.texts(folder, rows[:8]) == wanted[:8]
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with Server(*words, home=tmp_path) as server:
        assert server.text(folder, rows[5]) == wanted[5]


@pytest.mark.slow
def test_the_benchmark(capsys):
    assert serving.main(["--quick", "--repeats", "1", "--most", "1"]) == 0
    rates = re.findall(r"\((\d\.\d\d)\) \|", capsys.readouterr().out)
    assert len(rates) == 1 + len(serving.SPECS)
    assert rates[0] == "1.00"
