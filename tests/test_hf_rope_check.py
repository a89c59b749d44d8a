"""`wavepe.hf.check_rope`: the cosines and sines that the layers of a live model get."""

import pytest
import wavepe.hf
from hf_families import UNROTATED, build, by_turns
from hf_model import SCALINGS, patched_tiny, tiny
from wavepe.hf.families import FAMILIES
from wavepe.referee.report import INTERLEAVED


@by_turns(always=("llama", "smollm3"))
def test_stock_models_agree(family):
    verdict = wavepe.hf.check_rope(build(family))
    assert verdict, verdict


@pytest.mark.parametrize("kind", SCALINGS)
def test_scalings_agree(kind):
    model = tiny(rope_parameters={"rope_type": kind, "rope_theta": 50.0, **SCALINGS[kind]})
    for positions in (None, range(5)):
        verdict = wavepe.hf.check_rope(model, positions)
        assert verdict, verdict


def test_the_order_of_pairs_is_that_of_the_families():
    interleaved = {kind for kind, family in FAMILIES.items() if family.layout.interleaved}
    assert INTERLEAVED & FAMILIES.keys() == interleaved


def test_changed_models_differ():
    model = tiny(rope_parameters={"rope_type": "yarn", "rope_theta": 50.0, **SCALINGS["yarn"]})
    model.model.rotary_emb.attention_scaling = 1.0
    verdict = wavepe.hf.check_rope(model)
    assert (bool(verdict), verdict.mistakes) == (False, ("attention factor dropped",))
    assert str(verdict).startswith("layers 0, 1: attention factor dropped: ")
    narrow = wavepe.hf.check_rope(tiny(rope_parameters={"rope_theta": 5e5}).bfloat16(), range(4096))
    assert narrow.mistakes == ("bfloat16 frequencies",)


def test_one_layer_differs():
    model = tiny()

    def with_swapped_tables(layer, args, kwargs):
        return args, {**kwargs, "position_embeddings": kwargs["position_embeddings"][::-1]}

    layer = model.model.layers[1].self_attn
    hook = layer.register_forward_pre_hook(with_swapped_tables, with_kwargs=True, prepend=True)
    first, second = str(wavepe.hf.check_rope(model)).splitlines()
    assert first.startswith("layers 0: agrees")
    assert second.startswith("layers 1: cos and sin swapped: ")
    assert len(layer._forward_pre_hooks) == 1
    hook.remove()
    assert wavepe.hf.check_rope(model)


def test_other_models_are_refused():
    for model in (patched_tiny("rope"), *map(build, UNROTATED)):
        with pytest.raises(ValueError, match=r"stock model with RoPE: unpatch it"):
            wavepe.hf.check_rope(model)
    with pytest.raises(TypeError, match="needs a model"):
        wavepe.hf.check_rope("my-llama")
