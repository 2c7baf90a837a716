"""Federated-learning research inside PyTorch Lightning: one ``Trainer.fit`` is one federated run."""
