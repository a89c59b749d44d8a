"""Every operator of wavepe against what one would use instead; `python -m benchmarks.bench`."""
