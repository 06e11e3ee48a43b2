"""Rivals, experiments and theory beside Pigou, loaded through its entry points."""
