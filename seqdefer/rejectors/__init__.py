"""What scores where to defer: networks, confidence rules, the losses they minimise and how they are fitted."""

from seqdefer.renames import names_moved

__getattr__ = names_moved(__name__)
