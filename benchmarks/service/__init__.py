"""Load and failures against a real `seqdefer serve` process: `load` measures it, `soak` kills its expert all the while.

Both make a small text pair with random weights, fit it with `seqdefer fit`, and check every answer.
"""
