"""Names that the package shares with checkpoints and with transformers."""

NAME = "wavepe"  # of the attention and of its mask
MODEL_TYPE = "wavepe_llama"
CLASS_PREFIX = "WavePE"  # WavePELlamaForCausalLM is LlamaForCausalLM with an encoding
