"""Spelling to phonemes: words of the CMU Pronouncing Dictionary, read aloud by a small and a larger network."""
