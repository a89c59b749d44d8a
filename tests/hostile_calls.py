"""Call every public function with random arguments that it should refuse.

tests/test_hostile.py and `make fuzz` run this file in processes of their own:

    python tests/hostile_calls.py {numpy|torch} SEED FIRST COUNT    calls FIRST, FIRST + 1, ...

NUMPY and TORCH hold calls of each function. One or two arguments of a call are replaced: by
an object of another type, or by an array of another dtype, layout or size. A call depends on seed
and number alone, and is printed before it starts. No call may crash, hang, or change its arguments.
Errors must be those of the contract, and their messages must name what is needed.
"""

import ast
import contextlib
import dataclasses
import datetime
import os
import re
import sys
import tempfile
import traceback
import types
import warnings

import numpy as np
import sizes_calls
import wavepe
from sizes_calls import SECONDS, pick, watch
from wavepe import analysis, encodings
from wavepe.analysis import plots
from wavepe.arrays import wavelet_registered
from wavepe.encodings import base

F = np.float32
memory = np.linspace(-1, 1, 4096).astype(F)
nested = {}
nested["self"] = nested


def O(first, *shape):  # noqa: E743 - one letter, as A and E
    """An array within `memory`: two of them may overlap."""
    return memory[first : first + int(np.prod(shape))].reshape(shape)


def N(*shape, dtype=F):
    return np.linspace(0.1, 0.9, int(np.prod(shape))).reshape(shape).astype(dtype)


def T(*shape, dtype="float32"):
    return torch.linspace(0.1, 0.9, int(np.prod(shape))).reshape(shape).to(getattr(torch, dtype))


def fake(*shape):
    return FakeTensorMode().from_tensor(torch.ones(shape))


def subclass(x):
    return x.as_subclass(type("Subclass", (torch.Tensor,), {}))


def reader(**attributes):
    """A class for register_encoding."""
    return dataclasses.dataclass(frozen=True)(type("Own", (encodings.Encoding,), attributes))


# ---- what is due: a call of each function --------------------------------------------------------

SPECS = (*encodings.known_encodings(), "wavelet:learned=true", "wavelet:scales=2", "rope:theta=100")
SPECS += ("rope:inference_theta=scaled", "rope:type=dynamic,factor=2.0", "shaw:clip=3")
VALUES = ("1", "0", "-1", "1e400", "nan", "true", "None", "1+2+8", "8+", "ricker", "db2", "scaled")
VALUES += ("10" * 200, "yarn", "1e-320", "\u0663", "é", "")
TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "xx", None)


def spec():
    """The text of a spec, which may be wrong."""
    if pick.random() < 0.6:
        return repr(pick.choice(SPECS))
    name = pick.choice(SPECS).partition(":")[0]
    given = (f"{option_of(name)}={pick.choice(VALUES)}" for _ in range(pick.choice((1, 1, 2))))
    return repr(f"{name}:{','.join(given)}")


def option_of(name):
    """An option, most often one of the encoding `name`."""
    own = [field.name for field in dataclasses.fields(wavepe.encoding(name))]
    return pick.choice((*own, "theta", "xx"))


def scaling():
    """A dict of rope parameters, which may be wrong."""
    parts = {
        "rope_theta": ("100.0", "1", "-1"),
        "factor": ("2.0", "0", "4"),
        "original_max_position_embeddings": ("16", "0", "2**40"),
        "attention_factor": ("1.5",),
        "beta_fast": ("32", "1"),
        "short_factor": ("[1.0, 2.0, 3.0, 4.0]", "[]"),
        "long_factor": ("[1.0, 2.0, 3.0, 4.0]", "[1.0]"),
        "low_freq_factor": ("1.0", "4.0"),
        "high_freq_factor": ("4.0",),
        "partial_rotary_factor": ("0.5", "2"),
    }
    given = {key: pick.choice(values) for key, values in parts.items() if pick.random() < 0.6}
    if given and pick.random() < 0.5:
        given[pick.choice(list(given))] = pick.choice(ANYTHING)
    text = ", ".join(f"{key!r}: {value}" for key, value in given.items())
    return "{" + f"'rope_type': {pick.choice(TYPES)!r}, {text}" + "}"


def dictionary():
    """A dict of an encoding, which may be wrong."""
    name = pick.choice(SPECS).partition(":")[0]
    key = pick.choice((option_of(name), option_of(name), "version", "name"))
    value = pick.choice((*ANYTHING, "1", "0.5"))
    return "{" + f"'name': {name!r}, {key!r}: {value}" + "}"


NUMPY = """
wavepe.alibi_slopes(8)
wavepe.attention(N(2, 3, 4), N(2, 5, 4), N(2, 5, 6), p=N(7, 4), first=-1, \
beyond='edge', slopes=N(2))
wavepe.attention(N(2, 3, 4), N(5, 4), N(5, 6), causal=False, window=3, scale=0.5, return_lse=True)
wavepe.attention(N(2, 3, 4), N(2, 5, 4), N(2, 5, 6), p=N(7, 3), q_rel=N(2, 3, 3), sinks=N(2))
wavepe.attention(O(0, 3, 4), O(4, 5, 4), O(8, 5, 4), p=O(2, 3, 4))
wavepe.encoding(SPEC)
wavepe.encoding(SPEC, theta=100.0)
wavepe.encoding(SPEC, scales=[1, 2], kind='haar')
wavepe.encoding(DICT)
encodings.Encoding.from_dict(DICT)
encodings.RoPE.from_dict({'version': 1, 'name': 'rope', 'theta': 100.0})
encodings.ALiBi()
encodings.Kerple(kind='power')
encodings.RoPE(theta=100.0, fraction=0.5, interleaved=False, inference_theta='scaled')
encodings.RoPE(type='yarn', factor=2.0, original_max_position_embeddings=16, truncate=True)
encodings.Sandwich(dim=16)
encodings.Shaw(clip=3)
encodings.Sinusoidal(theta='length', reversed=True)
encodings.T5(buckets=6, max_distance=9)
encodings.TransformerXL(biases=True)
encodings.Wavelet(kind='ricker', scales=(1, 2), min_scale=1.0, fixed_scale=False, mirrored=None)
encodings.known_encodings()
encodings.option(1, encodings.options.number)
wavepe.gaussian(N(3, 4), N(4), N(3, 1))
wavepe.haar(N(3, 4), N(4), 0.5, out=N(3, 4), where=N(3, 4) > 0.5)
wavepe.morlet(N(3, 4), N(4), 0.5, dtype=np.float64)
wavepe.ricker(O(0, 3, 4), 1, O(4, 3, 4), out=O(2, 3, 4))
wavepe.register_encoding(reader(name='own', slopes=lambda self, heads: N(heads)))
wavepe.register_encoding(reader(name='own', slopes=lambda self, heads: N(heads), \
option=encodings.option(1, lambda l, v: v)))
wavepe.register_wavelet('own', np.sin, derivative=np.cos)
wavepe.register_wavelet('own', lambda u: u)
wavepe.apply_rope(N(2, 3, 8), np.arange(3), 100.0, interleaved=True, fraction=0.5)
wavepe.relative_bias(N(2, 3, 4), N(5, 4), 6, first=-1, beyond='edge')
wavepe.relative_bias(N(2, 3, 4), N(2, 5, 4), 6, out=N(2, 3, 6))
wavepe.rope(N(2, 3, 8), N(3, 4), N(3, 4), interleaved=True, inverse=False)
wavepe.rope(O(0, 2, 3, 8), N(3, 4), O(3, 3, 4), out=O(1, 2, 3, 8))
wavepe.rope_frequencies(8, 100.0, scaling=SCALING, length=32, max_length=16)
wavepe.rope_frequencies(8, scaling=SCALING, length=32)
wavepe.rope_report({'head_dim': 8, 'rope_theta': 100.0}, length=9, layer_type='')
wavepe.rope_report({'head_dim': 8, 'rope_parameters': SCALING}, length=32)
wavepe.rope_report({'head_dim': 8, 'rope_theta': 100.0}).check(cos=N(3, 4), sin=N(3, 4), \
positions=np.arange(3), q=N(2, 3, 8), rotated=N(2, 3, 8), inv_freq=N(4), float32_angles=True)
wavepe.rope_table(np.arange(3), N(4), attention_factor=2.0, precision='hf', dtype=np.float16)
wavepe.rope_table(np.arange(6).reshape(3, 2), N(4), sections=[1, 3])
wavepe.set_num_threads(2)
wavepe.get_num_threads()
wavepe.sinusoidal(np.arange(3), 8, 100.0, out=N(3, 8, dtype=np.float64))
wavepe.use_variant('portable')
wavepe.variant()
wavepe.variants()
wavepe.build_info()
wavepe.wavelet_grid(8, 4, 1, fixed_scale=True)
wavepe.wavelet_grid(8, [1, 2.5])
wavepe.wavelet_table(5, N(4), N(4), kind='haar', mirrored=True, dtype=np.float64)
wavepe.wavelet_table(np.arange(5), np.arange(1, 5), np.arange(4), kind='db2', out=N(5, 4))
wavepe.wavelet_table(np.arange(5), N(4), N(4), kind='test_sizes')
encoding(SPEC).absolute(np.arange(3), 8, length=5, trained_length=4)
encoding('sinusoidal:theta=length').absolute(np.arange(3), 8, length=5)
encoding('binary').absolute(np.arange(3), 8, length=5, trained_length=4)
encoding('integer').absolute(np.arange(3), 8)
encoding('normalised').absolute(np.arange(3), 8, length=5, trained_length=4)
encoding(SPEC).rope_table(np.arange(3), 8, length=5, trained_length=4)
encoding('rope').rope_table(np.arange(3), 8)
encoding('rope:inference_theta=scaled').rope_table(np.arange(3), 8, length=5, trained_length=4)
encoding('rope').frequencies(8, length=5, trained_length=4)
encoding(SPEC).table(5, 8, causal=True)
encoding('wavelet').table(5, 8, causal=False)
encoding('wavelet:kind=haar,scales=2').table(5, 8)
encoding(SPEC).slopes(4)
encoding('alibi').slopes(4)
encoding(SPEC).bias(5, 4, causal=True)
encoding('t5').bias(5, 4, causal=False)
encoding('kerple').bias(5, 4)
encoding('sandwich').bias(5, 4)
encoding(SPEC).parameters(8, 4)
encoding('shaw').parameters(8, 4)
encoding('transformer_xl').parameters(8, 4)
encoding('t5').parameters(8, 4)
encoding('kerple').parameters(8, 4)
encoding(SPEC).to_dict()
encoding(SPEC).trained_as()
analysis.attention_window(N(2, 3, 5, 5), threshold=0.01)
analysis.band_variance(N(3, 4))
analysis.multiscale_rope_matrix(3, 8, 100.0)
analysis.predicted_band(8, 100.0, 64)
analysis.rope_matrix(3, 8, 100.0)
analysis.rope_wavelet(N(3, 4), 3)
analysis.rope_wavelet_matrix(3, 8, 100.0)
analysis.shift_matrix(3, 8, 100.0)
analysis.wavelet_transform(N(3, 5), N(4), N(4), kind='ricker')
plots.accuracy_grid({'rope': [[0.5, 1.0], [0.25]]}, [8, 16], fixed('x.png'), train_length=8)
plots.attention_maps([N(4, 4), N(4, 4)], fixed('x.png'), titles=['a', 'b'])
plots.band_heatmap(N(5, 4), fixed('x.png'), measured=1.5, predicted=2.0, title='x')
plots.needle_grid(N(2, 1), fixed('x.png'), lengths=[4, 8], depths=[0.5], title='x')
plots.bias(fixed('x.png'), encodings=[SPEC, 'kerple'], heads=2, length=5)
plots.table(fixed('x.png'), encodings=SPEC, dim=8, length=5)
plots.wavelets(fixed('x.png'), encodings=['wavelet:scales=2'], dim=8, length=5)
"""

TORCH = """
ops.attention(T(1, 4, 3, 8), T(1, 2, 5, 8), T(1, 2, 5, 6), p=T(7, 8), first=-1, beyond='edge')
ops.attention(T(1, 4, 3, 8), T(1, 2, 5, 8), T(1, 2, 5, 6), p=T(4, 7, 8), q_rel=T(1, 4, 3, 8))
ops.attention(T(1, 4, 3, 8), T(1, 2, 5, 8), T(1, 2, 5, 6), p=T(7, 3), q_rel=T(1, 4, 3, 3))
ops.attention(T(1, 4, 3, 8), T(1, 2, 5, 8), T(1, 2, 5, 6), sinks=T(4), key_mask=T(1, 5) > 0.2)
ops.attention(T(1, 4, 3, 8), T(1, 2, 5, 8), T(1, 2, 5, 6), slopes=T(4), window=3, softcap=5.0)
ops.attention(T(1, 4, 5, 8), T(1, 2, 5, 8), T(1, 2, 5, 6), \
segments=T(1, 5, dtype='int64'), scale=0.5)
ops.attention(T(2, 4, 3, 8), T(2, 2, 5, 8), T(2, 2, 5, 6), \
offset=T(2, dtype='int64'), dropout_p=0.5)
ops.attention(T(2, 4, 3, 8), T(2, 2, 5, 8), T(2, 2, 5, 6), offset=2, causal=False, return_lse=True)
ops.attention(T(2, 4, 3, 8), T(2, 2, 5, 8), T(2, 2, 5, 6), key_mask=T(2, 5) > 0.2)
ops.attention(T(2, 4, 3, 8), T(2, 2, 5, 8), T(2, 2, 5, 6), mask=T(2, 1, 3, 5) > 0.2)
ops.attention(T(1, 4, 3, 8), T(1, 2, 5, 8), T(1, 2, 5, 6), p=ops.relative_table(T(7, 8)))
ops.attention(T(1, 4, 2, 8), T(1, 2, 4, 8), T(1, 2, 4, 6), p=T(7, 8), \
cu_seqlens_q=torch.arange(3), cu_seqlens_k=torch.arange(0, 5, 2))
ops.attention(T(1, 4, 2, 8), T(3, 2, 2, 8), T(3, 2, 2, 6), cu_seqlens_q=torch.arange(3), \
cu_seqlens_k=torch.arange(0, 5, 2), block_table=torch.arange(2)[:, None])
ops.merge_attention(T(2, 3, 4), T(2, 3))
ops.merge_attention([T(3, 4), T(3, 4)], [T(3), T(3)])
ops.relative_bias(T(2, 3, 4), T(5, 4), 6, first=-1, beyond='edge')
ops.relative_bias(T(2, 3, 4, dtype='bfloat16'), T(2, 5, 4, dtype='bfloat16'), 6)
ops.relative_table(T(5, 4), first=-1, beyond='edge')
ops.RelativeTable(N(2, 5, 4), -1, 'zero')
ops.relative_table(T(5, 4)).tensors(torch.float32, 'cpu')
ops.rope(T(1, 2, 3, 8), T(3, 4), T(3, 4), interleaved=True, inverse=False)
ops.rope_(T(1, 2, 3, 8), T(3, 4), T(1, 3, 4), interleaved=True, inverse=False)
ops.rope_qk(T(1, 2, 3, 8), T(1, 1, 3, 8), T(3, 4), T(1, 3, 4), interleaved=True, inverse=False)
ops.rope_table(torch.arange(3), T(4), attention_factor=2.0, precision='hf', dtype=torch.float16)
ops.rope_table(torch.arange(6).reshape(3, 2), T(4), sections=[1, 3])
ops.wavelet_table(5, T(4), T(4), kind='haar', mirrored=True)
ops.wavelet_table(torch.arange(5), T(4), T(4), kind='test_sizes')
ops.wavelet_table(torch.arange(5), torch.arange(1.0, 5), torch.arange(4.0), kind='db2')
raw.relative_bias(T(2, 3, 4), T(5, 4), 6, -1, 'edge')
raw.relative_bias_skew(T(3, 4), 6, -1, 'edge')
raw.relative_bias_unskew(T(3, 6), 4, -1, 'edge')
raw.rope(T(1, 2, 3, 8), T(3, 4), T(3, 4), True, False)
raw.rope_(T(1, 2, 3, 8), T(3, 4), T(3, 4), True, False)
raw.rope_qk(T(1, 2, 3, 8), T(1, 1, 3, 8), T(3, 4), T(3, 4), True, False)
raw.rope_table(torch.arange(6).reshape(3, 2), T(4), 2.0, 'hf', fixed([1, 3]), torch.float64)
raw.wavelet_table(torch.arange(5), T(4), T(4), 'haar', True)
raw.wavelet_table_backward(T(5, 4), torch.arange(5), T(4), T(4), 'morlet', None)
raw.sampled_wavelet_table(torch.arange(5), T(4), T(4), 'test_sizes', None)
raw.sampled_wavelet_table_backward(T(5, 4), torch.arange(5), T(4), T(4), 'test_sizes', None)
raw.attention_forward(T(1, 4, 3, 8), T(1, 2, 5, 8), T(1, 2, 5, 6), T(7, 8), -1, 'edge')
raw.attention_ragged(torch.arange(3), torch.arange(0, 5, 2), torch.arange(2)[:, None], \
T(1, 4, 2, 8), T(3, 2, 2, 8), T(3, 2, 2, 6), T(7, 8), -1, 'edge')
raw.attention_backward(T(1, 4, 3, 6), T(1, 4, 3), T(1, 4, 3, 6), T(1, 4, 3), T(1, 4, 3, 8), \
T(1, 2, 5, 8), T(1, 2, 5, 6), T(7, 8), -1, 'edge')
nn.KVCache().crop(0)
nn.KVCache().reorder(torch.arange(2))
cache(2, 3).crop(2)
cache(2, 3).reorder(torch.tensor([1, 0]))
nn.Rotary(8, 100.0, scaling=SCALING, interleaved=True, trained_length=16, precision='hf')
nn.Rotary(8, fraction=0.5)
nn.Rotary(8)(T(2, 2, 3, 8), T(2, 1, 3, 8), torch.arange(3))
nn.Rotary(8, scaling={'rope_type': 'dynamic', 'factor': 2.0}, trained_length=2)(T(2, 2, 3, 8), \
T(2, 1, 3, 8), torch.arange(6).reshape(2, 3))
setattr(fixed(nn.Rotary(8)), fixed('theta'), 100.0)
setattr(fixed(nn.Rotary(8)), fixed('scaling'), SCALING)
nn.AbsoluteEncoding(SPEC, 16, trained_length=4)
nn.AbsoluteEncoding('sinusoidal', 16)(T(2, 3, 16), torch.arange(3))
nn.AbsoluteEncoding('sinusoidal:theta=length', 16)(T(2, 3, 16), torch.arange(6).reshape(2, 3))
nn.Attention(SPEC, 8, 4, 2, causal=False, dropout=0.5, trained_length=4, device='cpu')
nn.Attention('wavelet', 8, 4, 2)(T(2, 4, 3, 8), T(2, 2, 5, 8), T(2, 2, 5, 6), window=3, softcap=5.0)
nn.Attention('rope', 8, 4, 2)(T(2, 4, 3, 8), T(2, 2, 5, 8), T(2, 2, 5, 6), \
positions=torch.arange(5), key_mask=T(2, 5) > 0.2)
nn.Attention('alibi', 8, 4, 2)(T(2, 4, 5, 8), T(2, 2, 5, 8), T(2, 2, 5, 6), \
segments=torch.tensor([[0, 0, 1, 1, 1]]))
nn.Attention('shaw', 8, 2)(T(2, 2, 5, 8), T(2, 2, 5, 8), T(2, 2, 5, 6), cache=nn.KVCache())
nn.SelfAttention(16, 2, kv_heads=1, encoding=SPEC, causal=False, dropout=0.5)
nn.SelfAttention(16, 2, head_dim=8, bias=True, window=3, trained_length=4, device='cpu')
nn.SelfAttention(16, 2, encoding='wavelet')(T(2, 3, 16), key_mask=T(2, 3) > 0.2)
nn.SelfAttention(16, 2, encoding='rope')(T(2, 3, 16), positions=torch.arange(3))
nn.SelfAttention(16, 2, encoding='alibi')(T(2, 3, 16), positions=torch.arange(3)[None])
nn.SelfAttention(16, 2, encoding='shaw')(T(2, 3, 16), segments=torch.tensor([[0, 0, 1]]))
nn.SelfAttention(16, 2, encoding='transformer_xl')(T(2, 3, 16), cache=nn.KVCache())
analysis.attention_map(llama(), torch.arange(10))
analysis.measured_band(llama(), torch.arange(10), of='query')
analysis.needle(llama(vocab_size=256), None, [30, 40], [0, 0.5], form='pairs', trials=2, seed=3)
analysis.needle(llama(vocab_size=256), None, [60], (0.5, 1), haystack='It was.')
analysis.perplexity(causal(), torch.arange(10), 4, protocol='whole')
analysis.perplexity(causal(), torch.arange(10), 5, protocol='sliding', window=3, stride=2)
analysis.plots.perplexity_by_length([{'encoding': 'rope', 'perplexity': {8: 2.0, 16: 3.0}}], \
fixed(os.devnull + '.png'), train_length=8, title='x', unit='token')
hf.WavePELlamaConfig(position_encoding=SPEC)
hf.WavePELlamaConfig(position_encoding=DICT)
hf.patch(llama(), SPEC)
hf.patch(llama(), DICT)
hf.patch(llama(), {'0': SPEC, '1': 'none'})
hf.patch(llama(), 'wavelet', scales=2)
entered(fixed(hf.patched), llama(), SPEC)
hf.unpatch(hf.patch(llama(), 'alibi'))
hf.set_theta(llama(), 100.0)
hf.patch_llama(SPEC)
hf.convert(fixed('nowhere'), fixed('nowhere-either'), SPEC, link=False)
"""


# ---- what is given instead -----------------------------------------------------------------------
def listed(text):
    """Return the lines of a text, and split them at vertical bars."""
    return [part.strip() for part in text.strip().replace("\n", "|").split("|")]


ANYTHING = listed("""
None | True | 'x' | '' | b'x' | {} | [] | () | object() | 1j | ... | nested | float('nan')
float('inf') | -float('inf') | 1e-320 | 0.5 | -0.0 | 0 | -1 | 1 | 10**30 | -10**30 | 2**63 | 2**64
2**61 | 2**58 | 2**40 | -2**63 | 10**400 | [None] | [[1], [1, 2]] | ['x'] | [[]] | {'a': 1}
{1: {}} | {1, 2} | range(3) | range(2**58) | np.int8(3) | np.float16(2) | np.bool_(True)
np.str_('x') | np.array(None) | iter([1]) | lambda *_: None | int | np | 'a\\x00b' | '\\ud800'
np.datetime64('2020') | datetime.timedelta(1) | type('Int', (int,), {})(3)
""")

ARRAYS = listed("""
A(2**58) | A(2**58, 0) | A(0, 2**58) | A(2**58, 2**2) | A(2**31, 0, 4) | A(0) | A() | N(1)
N(2, 3) | N(1, 1, 1, 1, 1, 1) | A(*[1] * 60) | A(2**62 - 1) | np.zeros(3, 'i4,f4')
np.zeros(2, 'M8[s]') | np.array(['x', 'y']) | np.zeros(0) | np.array([1, None])
np.zeros((2, 2), 'S3') | np.array([10**30]) | np.zeros(3, 'V2')
""")

# Changes of an argument that is an array.
LIKE = listed("""
{}.astype({dtype!r}) | {}[::-1] | {}[..., ::-1] | {}[..., ::2] | {}[..., :0] | {}[:0] | {}[None]
{}[0] | {}[..., None] | {}.T | read_only({}) | {}.tolist() | {} * np.nan | {} * np.inf
np.matrix({}) | np.ma.masked_array({}) | np.asfortranarray({}) | -{}
np.broadcast_to({}, (2**58, *{}.shape)) | np.broadcast_to({}[..., :1], (3, 2**58))
np.broadcast_to({}[:1], ({size}, *{}.shape[1:])) | {}.astype('>f4') | {} * 1e300 | {} * 0
np.broadcast_to({}[..., :1], (*{}.shape[:-1], {size})) | np.repeat({}, 2, -1)
""")
DTYPES = listed("""
? | i1 | u8 | i8 | f2 | f4 | f8 | g | c8 | O | U9 | S9 | M8[s] | m8[D] | V4
""")

TENSORS = listed("""
E(2**58) | E(2**58, 0) | E(0, 2**58) | E(2**31, 0, 4) | T(0) | T() | T(2, 3) | T(1, 1, 1, 1, 1, 1)
E(*[1] * 60) | E(2**62 - 1) | fake(3, 4) | T(3).to_sparse() | T(3, 3).to_sparse_csr()
torch.quantize_per_tensor(T(3, 4), 0.1, 0, torch.qint8) | torch.tensor([5, -1])
torch.zeros(0, 3, dtype=torch.int64) | T(0, 3, 16) | torch.nested.nested_tensor([T(2), T(3)])
T(3, 4).to_mkldnn() | torch.float32
""")

TENSOR_LIKE = listed("""
{}.to(torch.{dtype}) | {}.flip(0) | {}[..., ::2] | {}[..., :0] | {}[:0] | {}[None] | {}[0]
{}[..., None] | {}.mT | {}.numpy() | {}.tolist() | {}.to('meta') | {}.requires_grad_()
{}.to_sparse() | {} * float('nan') | subclass({}) | -{} | torch.nn.Parameter({}) | {}._neg_view()
{}.expand(2**58, *{}.shape) | {} * 1e30 | {}[:1].expand({size}, *{}.shape[1:])
{}[..., :1].expand(*{}.shape[:-1], {size}) | {}.clone().as_strided({}.shape, [0] * {}.dim())
torch.conj({} + 0j) | [{}] | ({},) | FakeTensorMode().from_tensor({}) | {}.to_mkldnn()
torch.view_as_real({} + 0j)
""")
TENSOR_DTYPES = listed("""
bool | int8 | uint8 | int64 | uint16 | float16 | bfloat16 | float64 | complex64 | float8_e4m3fn
float8_e5m2
""")


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def hostile(side, name, text):
    """Return the source text of a hostile value that replaces `text`."""
    is_array = re.match(r"[NOT]\(|(np|torch)\.a", text) is not None
    of_tensors = side == "torch" and pick.random() < 0.8
    how = pick.random()
    if is_array and how < 0.6:
        likes, dtypes = (TENSOR_LIKE, TENSOR_DTYPES) if of_tensors else (LIKE, DTYPES)
        if name.startswith("analysis.perplexity"):  # which may take as long as its tokens
            likes = [like for like in likes if "size" not in like]
        like, size = pick.choice(likes), pick.choice((2**58, 2**62, 2**22))
        return like.replace("{dtype!r}", repr(dtype := pick.choice(dtypes))).format(
            *[text] * 4, dtype=dtype, size=size
        )
    if how < (0.8 if is_array else 0.2):
        return pick.choice(TENSORS if of_tensors else ARRAYS)
    return pick.choice(ANYTHING)


def drawn(side, seed, number):
    """(function, arguments) as source text; and whether they are right, so that a result is due."""
    pick.seed(f"{side}:{seed}:{number}")
    call = CALLS[side][number % len(CALLS[side])]
    right = not re.search("SPEC|SCALING|DICT", call)
    for word, draw in (("SPEC", spec), ("SCALING", scaling), ("DICT", dictionary)):
        while word in call:
            call = call.replace(word, draw(), 1)
    tree = ast.parse(call, mode="eval").body
    given = [ast.unparse(node) for node in tree.args]
    named = {node.arg: ast.unparse(node.value) for node in tree.keywords}
    places = [i for i, text in enumerate(given) if not text.startswith("fixed(")] + list(named)
    replaced = pick.sample(places, min(len(places), pick.choice((0, 1, 1, 1, 1, 2))))
    for at in replaced:
        into = given if isinstance(at, int) else named
        into[at] = hostile(side, call, into[at])
    parts = given + [f"{name}={text}" for name, text in named.items()]
    return ast.unparse(tree.func), ", ".join(parts), right and not replaced


# ---- judging -------------------------------------------------------------------------------------

# Words of errors that happen to a function, rather than being raised by it.
VAGUE = listed("""
API call failed | bad_alloc | internal | INTERNAL
out of range | not subscriptable | unsupported operand | has no len() | not iterable
not supported between | unhashable | The truth value | expected str instance | has no attribute
object is not | non-integer | only integer | cannot convert | too large to convert | not callable
too big | must be str, not | expected string | maximum recursion | not enough values
""")


# Functions that run a model over tokens.
OF_TOKENS = listed("analysis.perplexity | analysis.attention_map | analysis.measured_band")


def allowed(name):
    if name.startswith("raw.") or name.startswith("ops."):
        return (RuntimeError,)
    if name.startswith("nn."):
        return (ValueError, TypeError, RuntimeError, MemoryError)
    if name.startswith(("hf.", "cache", "setattr", "entered", *OF_TOKENS)):
        return (ValueError, TypeError, RuntimeError)
    if name.startswith("encoding("):
        return (ValueError, TypeError, MemoryError, NotImplementedError)
    if name == "wavepe.rope_report":
        return (ValueError, TypeError, OSError)  # a file that is not there
    return (ValueError, TypeError, MemoryError)


def check_error(name, error, right):
    message = str(error)
    if isinstance(error, ImportError) and "pip install" in message:
        return
    assert not right, "raised, where all arguments are right"
    kind = type(error)
    ufunc = name.removeprefix("wavepe.") in ("ricker", "gaussian", "morlet", "haar")
    if kind in (OverflowError, MemoryError) or message.startswith("array is too big"):
        return  # Python's and NumPy's own, of numbers that no dtype holds and of such sizes
    if re.search(
        "all Tensors to FakeTensors|Mixing fake modes|Multiple dispatch failed"
        "|'Subclass' and 'Subclass'",
        message,
    ):
        return  # torch's own, of every operator
    assert isinstance(error, allowed(name)), f"raised {kind.__name__}"
    assert kind is not RecursionError
    if ufunc:
        return  # NumPy's own words
    assert message.strip(), "says nothing"
    if name.startswith("raw.") and "Expected a value of type" in message:
        return  # torch's own, of every operator
    if traceback.extract_tb(error.__traceback__)[-1].filename.endswith("nn/modules/linear.py"):
        return  # torch's own: a projection without memory
    vague = [words for words in VAGUE if words in message]
    assert not vague, f"says {vague}"
    assert not message.startswith("setting an array element"), "does not say which argument"


def bytes_of(value):
    """Return the bytes of an argument, if it is small, to see whether it has changed."""
    if isinstance(value, np.ndarray) and value.size < 4096 and value.dtype.kind not in "OV":
        return value.tobytes()
    if SIDE == "torch" and isinstance(value, torch.Tensor) and value.is_cpu:
        plain = (
            value.layout is torch.strided
            and not value.is_nested
            and not value.is_quantized
            and type(value) in PLAIN
        )
        if plain and value.numel() < 4096:
            return value.detach().resolve_neg().resolve_conj().contiguous().view(-1).tolist()
        return None
    if isinstance(value, (list, tuple, dict)) and value is not nested:
        items = value.values() if isinstance(value, dict) else value
        return [bytes_of(item) for item in items], len(value)
    return None


def writes(name, key):
    return key == "out" or name.endswith("_") or name in ("setattr", "entered")


def causal():
    """Return a model with the interface that perplexity needs."""

    class Model(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            return types.SimpleNamespace(logits=torch.zeros(*input_ids.shape, 16))

    return Model()


def cache(batch, length):
    """A cache that a module has filled."""
    kept = nn.KVCache()
    with torch.no_grad():
        kept.owner = nn.SelfAttention(8, 2, encoding="rope")
        kept.owner(T(batch, length, 8), cache=kept)
    return kept


def entered(manager, *args, **kwargs):
    with manager(*args, **kwargs):
        pass


def derive(result):
    """Backward, where something of the result asks for it."""
    parts = result if isinstance(result, (list, tuple)) else (result,)
    for part in parts:
        plain = type(part) is torch.Tensor and part.requires_grad and part.is_cpu
        if plain and 0 < part.numel() < 2**20:
            part.sum().backward(retain_graph=True)


def run(number, name, given, right):
    """Make a call; return False if its arguments or its function cannot be made here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            positional, named = eval(f"arguments({given})", SCOPE)
            function = eval(name, SCOPE)
    except Exception:
        return False
    print(f"{number}: {name}({given})", flush=True)
    everything = [*enumerate(positional), *named.items()]
    kept = {key: repr(bytes_of(x)) for key, x in everything if not writes(name, key)}
    outs = [x for key, x in everything if key == "out" and isinstance(x, np.ndarray)]
    overlap = any(
        np.may_share_memory(x, out)
        for _, x in everything
        for out in outs
        if x is not out and isinstance(x, np.ndarray)
    )
    try:
        watch(SECONDS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(*positional, **named)
            if SIDE == "torch":
                derive(result)
        watch(0)
    except Exception as error:
        watch(0)
        check_error(name, error, right)
    changed = [key for key, x in everything if key in kept and kept[key] != repr(bytes_of(x))]
    assert overlap or not changed, f"changed its arguments {changed}"
    return True


def restore():
    wavepe.use_variant(VARIANT)
    wavepe.set_num_threads(1)
    base.known.pop("own", None)
    wavelet_registered._known.pop("own", None)
    if SIDE == "torch" and hf.patching._replaced:
        hf.unpatch_llama()


def fixed(value):
    """Return an argument that is not to be replaced."""
    return value


CALLS = {"numpy": NUMPY.strip().splitlines(), "torch": TORCH.strip().splitlines()}
VARIANT = wavepe.variant()


def main(seed, first, count):
    """Run the calls and return the number of failures; print how to repeat each."""
    failures, done = 0, [0] * len(CALLS[SIDE])
    for number in range(first, first + count):
        try:
            done[number % len(done)] += run(number, *drawn(SIDE, seed, number))
        except AssertionError as error:
            failures += 1
            cause = f"\n  {type(error.__context__).__name__}: {error.__context__}"
            print(f"FAILED {number}: {error}{cause if error.__context__ else ''}", flush=True)
            print(f"  again: python tests/hostile_calls.py {SIDE} {seed} {number} 1", flush=True)
        finally:
            restore()
    never = [call for call, made in zip(CALLS[SIDE], done, strict=True) if not made]
    if count > 20 * len(done) and never:
        failures += 1
        print("FAILED: never made", *never, sep="\n  ")
    print(f"{sum(done)} calls, {failures} failures")
    return failures


if __name__ == "__main__":
    SIDE, seed, first, count = sys.argv[1:]
    sys.stdout.reconfigure(errors="backslashreplace")
    os.environ["HF_HUB_OFFLINE"] = "1"
    wavepe.register_wavelet("test_sizes", np.sin, derivative=np.cos)
    SCOPE = vars(sizes_calls) | globals() | {"datetime": datetime, "encoding": wavepe.encoding}
    SCOPE |= {"analysis": analysis, "plots": plots}
    with contextlib.suppress(ImportError):  # pictures are laid out, and not drawn
        from matplotlib.figure import Figure

        Figure.savefig = lambda *_, **__: None
    if SIDE == "torch":
        import hf_model
        import torch
        import wavepe.analysis.plots
        from torch._subclasses import FakeTensorMode
        from wavepe import hf, nn, ops

        PLAIN = (torch.Tensor, torch.nn.Parameter)
        sizes_calls.torch = torch
        SCOPE |= {"torch": torch, "ops": ops, "nn": nn, "hf": hf, "raw": torch.ops.wavepe}
        SCOPE |= {"FakeTensorMode": FakeTensorMode, "llama": hf_model.tiny}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sizes_calls.limit_memory()
        failed = main(seed, int(first), int(count))
    sys.exit(failed > 0)
