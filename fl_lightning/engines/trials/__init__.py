"""Steps that are tried on copies of the learner before round 0."""
