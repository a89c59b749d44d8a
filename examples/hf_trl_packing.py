"""Fine-tune with TRL's SFTTrainer on packed sequences: texts in one row do not see each other.

python examples/hf_trl_packing.py
"""

import tempfile
import textwrap
from pathlib import Path

import torch
import wavepe.hf
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def byte_tokenizer():
    """Return a tokenizer with a token for each byte and one for the end; use your model's own."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def fresh_model(tokenizer):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=4, **sizes))
    return wavepe.hf.patch(model, "wavelet:scales=4")


def main(folder):
    tokenizer = byte_tokenizer()
    texts = [line for line in Path(textwrap.__file__).read_text("utf-8").splitlines() if line]
    config = SFTConfig(
        output_dir=folder,
        # "bfd" fills rows of max_length with whole texts; the positions of each text begin at 0.
        # wavepe finds the texts by these position ids, and needs no mask of length x length.
        # (With "wrapped", texts see each other, whatever the attention.)
        packing=True,
        packing_strategy="bfd",
        max_length=128,
        per_device_train_batch_size=2,
        max_steps=4,
        learning_rate=3e-3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    trainer = SFTTrainer(
        fresh_model(tokenizer),
        config,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
    )
    trainer.train()

    model, batch = trainer.model.eval(), next(iter(trainer.get_train_dataloader()))
    ids, positions = batch["input_ids"], batch["position_ids"]
    starts = (positions[0] == 0).nonzero().flatten().tolist()
    print(f"{len(starts)} texts in a row of {ids.shape[1]} tokens")
    with torch.no_grad():
        packed = model(ids, position_ids=positions).logits
        alone = [model(text).logits for text in ids.tensor_split(starts[1:], dim=1)]
    difference = (packed - torch.cat(alone, dim=1)).abs().max().item()
    print(f"logits of each text alone differ by {difference:.0e}")
    return trainer, batch


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
