"""Partial deferral of sequences: a cheap predictor writes, a learned rejector says where an expert takes over.

The public names are listed in `__init__.pyi`. Each is imported from its module on first use, so that `import seqdefer`
stays instant and the command line can print its help without loading PyTorch.
"""

import lazy_loader

from seqdefer.renames import refuse_old_modules

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]

refuse_old_modules()
