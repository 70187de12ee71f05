"""Policies of RL4CO as TSP predictors of seqdefer.

predictor = RL4COPredictor(model.policy)                 # of AttentionModel, POMO, SymNCO, PolyNet, PointerNetwork
save_policy(model.policy, folder, {"embed_dim": 128})    # then: seqdefer run tsp --predictor rl4co:FOLDER
"""

import torch

_threads = torch.get_num_threads()
from seqdefer_rl4co.checkpoints import load_predictor, save_policy  # noqa: E402
from seqdefer_rl4co.predictor import RL4COPredictor  # noqa: E402

torch.set_num_threads(_threads)  # importing RL4CO changes it

__all__ = ["RL4COPredictor", "load_predictor", "save_policy"]
