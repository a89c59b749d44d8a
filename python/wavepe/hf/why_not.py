"""Why `patch` does not take a model type, as the source of its modelling file tells.

`families.decoder` puts the reason into its error. `benchmarks.hf_other_types` makes a table of all
types, and imports none of their files for it.
"""

from __future__ import annotations

import ast
import re

# Reason -> what is in the source of such a model. The first one that fits counts.
PARTS = {
    "it has parts for images or sound": r"self\.(vision|visual|image|audio|speech)\w* = ",
    "it is a part around a model of another type": r"\bAutoModel\w*\.from_config",
    "some of its layers read an encoder": r"self\.(encoder_attn|cross_attn) = ",
    "layers of it keep a state: linear attention, a state space, a convolution": (
        r"(?i:mamba|delta_?net|delta_rule|linear_attn|lightning|recurrent|rwkv|lstm|causal_conv|"
        r"short_?conv)"
    ),
    "it has multi-head latent attention, whose rotated dims are beside the others": (
        r"kv_lora_rank|kv_a_proj"
    ),
    "its attention chooses keys: by blocks, hashes or an indexer": (
        r"(?i:lsh\w*attention|block_?sparse_?attention|indexer)"
    ),
    "its positions have several coordinates (mrope)": r"mrope_section",
}
ROTATES = r"(?i:rotary|rope\b|apply_rot)"
BIASES = r"(?i:alibi|relative|position_bias|slopes)"
BIASED = "it has a bias or a term of the distance, and no rotary module to replace"
NO_ROTARY = "it has no rotary module to replace"
NO_INTERFACE = "its attention layers do not call transformers' attention interface"
UNTESTED = "wavepe does not test this family, and could not see what is different in it"


def why_not(source: str, model: str) -> str:
    """Return the reason why the class called `model` cannot be patched.

    Parameters
    ----------
    source : str
        Its modelling file.
    """
    text = reached(source, model)
    for reason, pattern in PARTS.items():
        if re.search(pattern, text):
            return reason
    if not re.search(ROTATES, text):
        return BIASED if re.search(BIASES, text) else NO_ROTARY
    return UNTESTED if "ALL_ATTENTION_FUNCTIONS" in text else NO_INTERFACE


def reached(source: str, name: str) -> str:
    """Return the code of a class or function and of all in its file that it names."""
    parts = (ast.ClassDef, ast.FunctionDef)
    found = {node.name: node for node in ast.parse(source).body if isinstance(node, parts)}
    used: dict[str, str] = {}
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one in found and one not in used:
            for node in ast.walk(found[one]):
                if isinstance(node, parts):
                    _strip(node)
            used[one] = ast.unparse(found[one])
            waiting += [x.id for x in ast.walk(found[one]) if isinstance(x, ast.Name)]
    return "\n".join(used.values())


def _strip(node: ast.ClassDef | ast.FunctionDef) -> None:
    """Take out the docstring, and `_init_weights`, which names other models of the file."""
    if ast.get_docstring(node) is not None:
        node.body[0] = ast.Pass()
    node.body = [part for part in node.body if getattr(part, "name", "") != "_init_weights"]
    node.body = node.body or [ast.Pass()]
