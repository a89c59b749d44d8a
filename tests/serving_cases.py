"""Ways to serve a model, for the tests; run as a script, it prints a table of all encodings.

`python tests/serving_cases.py [WORD ...]` asks each way of serving for the tokens of each family
and each encoding (those whose name or spec has one of the words), and compares them with those of
`generate` for each request alone. It takes half an hour.
"""

import contextlib
import json
import os
import signal
import socket
import string
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import encoding_cases
import tokenizers
import torch
import transformers
import wavepe.hf
from hf_families import FAMILIES, build, stirred
from hf_model import LENGTH, VOCABULARY

NEW = 12
COUNTS = (5, 37, 12, 60)  # of the prompts' tokens; the longest takes several passes
LONGROPE = "short_factor=1+1+1+1,long_factor=2+3+4+5,original_max_position_embeddings=8"
FOLLOW_LENGTH = (
    "rope:theta=20,inference_theta=scaled", "rope:type=dynamic,factor=4",
    f"rope:type=longrope,{LONGROPE}", "rope:type=yarn,factor=scaled",
    *encoding_cases.FOLLOW_LENGTH,
)  # fmt: skip
BY_LAYER = ("rope@0+wavelet:scales=4@1", "rope:self_extend=2,neighbors=4+window:size=20")
RECOMMENDED = "wavelet:scales=4,biases=true,projection=true+kerple"
IN_FAMILIES = ("rope", "rope+wavelet:scales=4", RECOMMENDED, "sinusoidal", "pope:theta=100",
               FOLLOW_LENGTH[3], "wavelet:scales=2,rank=2,from_input=true",
               "rope:theta=100+sink+window:size=4+temperature:floor=3,alpha=0.5")  # fmt: skip
WAYS = ("generate_batch", "serve", "serve --continuous-batching")
SETTINGS_OF_SERVER = ("--cb-block-size=8", "--cb-num-blocks=64", "--cb-max-batch-tokens=48")
SETTINGS = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 48}  # else all free memory


def specs():
    """Every encoding that a Llama can have and continuous batching can carry."""
    names = (*encoding_cases.CONSTANT, *encoding_cases.LEARNED, *encoding_cases.COMBINED)
    names += (*encoding_cases.IN_CALL, *encoding_cases.COMBINED_IN_CALL, *FOLLOW_LENGTH, *BY_LAYER)
    names = dict.fromkeys((*map(str, names), RECOMMENDED))
    return [name for name in names if "fox" not in name and "interleaved" not in name]


def prompts(counts=COUNTS, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in counts]


def alone(model, rows, new=NEW):
    """The tokens of `generate` for each row alone, at its own length."""
    tokens = []
    for row in rows:
        if wavepe.hf.encoding_of(model) is not None:
            wavepe.hf.fix_length(model, len(row) + new)
        ids = torch.tensor([row])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new}
        tokens.append(model.generate(ids, do_sample=False, **options)[0, len(row) :].tolist())
    if wavepe.hf.encoding_of(model) is not None:
        wavepe.hf.fix_length(model, None)
    return tokens


def outputs_of(model, rows, new=NEW, persistent_manager=False, **settings):
    """The outputs of `generate_batch`."""
    config = transformers.ContinuousBatchingConfig(**SETTINGS | settings)
    greedy = transformers.GenerationConfig(max_new_tokens=new, eos_token_id=-1, do_sample=False)
    options = {"continuous_batching_config": config, "persistent_manager": persistent_manager}
    return [*model.generate_batch(rows, generation_config=greedy, **options).values()]


def batched(model, rows, new=NEW, **settings):
    """The tokens of `generate_batch`."""
    outputs = outputs_of(model, rows, new, **settings)
    errors = [output.error for output in outputs if output.error is not None]
    assert not errors, errors
    return [output.generated_tokens for output in outputs]


# ------------------------------------------------------------------ the server

TOKENS = string.ascii_letters[:VOCABULARY]  # other letters are several tokens of Qwen2's


def text_of(tokens):
    return "".join(TOKENS[token] for token in tokens)


def save(model, folder):
    """Write a folder with a tokenizer whose tokens are letters."""
    names = {letter: index for index, letter in enumerate(TOKENS)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token=TOKENS[0]))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    plain.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


TRANSFORMERS = ("transformers.cli.transformers", "serve", "--trust-remote-code")


class Server:
    """A server on the loopback address, in a process that does not import wavepe by itself."""

    def __init__(self, *words, home, module=TRANSFORMERS, **environment):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", *module, *map(str, words)]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        self.log = Path(home, f"log-{self.port}")
        with self.log.open("w") as log:
            options = {"env": {**os.environ, **environment}, "start_new_session": True}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, **options)

    def __enter__(self):
        end = time.monotonic() + 600  # of a busy machine
        while True:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            with contextlib.suppress(OSError), self.open("/health"):
                return self
            assert time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.2)

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):  # a shutdown waits for open connections
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def open(self, path, body=None):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        return urllib.request.urlopen(request, timeout=120)

    def ask(self, folder, row, new=NEW, stream=False):
        """Begin a completion; return the open answer."""
        body = {"model": folder, "prompt": text_of(row), "max_tokens": new, "temperature": 0}
        return self.open("/v1/completions", {**body, "stream": stream})

    def text(self, folder, row, new=NEW, stream=False):
        """The completion of a prompt."""
        with self.ask(folder, row, new, stream) as answer:
            if not stream:
                return json.load(answer)["choices"][0]["text"]
            events = [json.loads(x[6:]) for x in answer if x.startswith(b"data: {")]
        if refused := [event for event in events if "choices" not in event]:
            raise ValueError(refused[0])
        return "".join(event["choices"][0]["text"] for event in events if event["choices"])

    def texts(self, folder, rows, new=NEW):
        """The completions of several prompts, which are asked for and streamed at once."""
        with ThreadPoolExecutor(len(rows)) as pool:
            return list(pool.map(lambda row: self.text(folder, row, new, stream=True), rows))


# ------------------------------------------------------------------ the table


def cases():
    """Family and spec of each model."""
    return dict.fromkeys([*product(["llama"], specs()), *product(FAMILIES, IN_FAMILIES)])


def model_of(family, spec):
    """A model whose embeddings are small, so that the next token depends on those before."""
    model = build(family, max_position_embeddings=LENGTH)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.1)
    return stirred(wavepe.hf.patch(model, spec))


def outcome(wanted, way, *arguments):
    """How what a way of serving gives compares with `wanted`, in a word."""
    try:
        return "equal" if way(*arguments) == wanted else "differs"
    except (ValueError, OSError, AssertionError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return "refused"


def main(words):
    rows, batching = prompts(), ("--continuous-batching", *SETTINGS_OF_SERVER)
    print(f"| family | encoding | {' | '.join(WAYS)} | without it |\n|---|---|---|---|---|---:|")
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server(*x, home=home)) for x in ((), batching)]
        for number, (family, spec) in enumerate(cases()):
            if not any(word in (family, spec) for word in words) and words:
                continue
            model = model_of(family, spec)
            wanted, folder = alone(model, rows), save(model, Path(home, str(number)))
            cells = [outcome(wanted, batched, model, rows)]
            texts = list(map(text_of, wanted))
            cells += [outcome(texts, server.texts, folder, rows) for server in servers]
            others = alone(model_of(family, "none"), rows)
            same = sum(x == y for x, y in zip(wanted, others, strict=True))
            print(f"| {family} | `{spec}` | {' | '.join(cells)} | {same} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
