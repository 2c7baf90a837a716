"""``fl-lightning report`` makes tables, figures, intervals and verdicts from the folders of runs.

``runs`` reads folders; ``scores`` and ``intervals`` compute; ``summary`` holds the content of
``report.json``; ``sections`` makes tables of it, ``charts`` and ``curves`` make figures, and
``page`` puts both on one page. Nothing here imports torch.
"""
