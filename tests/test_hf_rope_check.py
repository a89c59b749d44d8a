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


@by_turns(always=("llama", "phi3"))
def test_models_of_wavepe_agree(family):
    for spec in ("rope", "rope:theta=77", "rope:type=yarn,factor=4", "rope:type=dynamic,factor=2"):
        model = wavepe.hf.patch(build(family), spec)
        for length in (None, 128):
            verdict = wavepe.hf.check_rope(wavepe.hf.fix_length(model, length))
            assert verdict, f"{spec}: {verdict}"


def test_a_folder_of_wavepe_agrees(tmp_path):
    model = patched_tiny("rope:type=yarn,factor=4")
    model.save_pretrained(tmp_path)
    (rotation,) = model.model.rotary_emb.rotations
    assert wavepe.rope_report(tmp_path).check(inv_freq=rotation.rotation.at(1, False).array)


def test_other_models_are_refused():
    for spec in ("alibi", "rope+alibi", "rope@0", {"0": "rope", "1": "alibi"}):
        with pytest.raises(ValueError, match=r"alone, the same in all layers, got .*(alibi|@)"):
            wavepe.hf.check_rope(patched_tiny(spec))
    for model in map(build, UNROTATED):
        with pytest.raises(ValueError, match="needs RoPE, and no layer of this inkling"):
            wavepe.hf.check_rope(model)
    with pytest.raises(TypeError, match="needs a model"):
        wavepe.hf.check_rope("my-llama")
