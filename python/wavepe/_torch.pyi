"""The operators of torch.ops.wavepe: importing it registers them."""
