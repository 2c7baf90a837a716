"""``fl-lightning report`` makes tables, figures, intervals and verdicts from the folders of runs.

``runs`` reads folders; ``scores`` and ``intervals`` compute; ``summary`` holds the content of
``report.json``; ``report_tables`` and ``figures`` show it, and ``report_files`` puts both on
one page. Nothing here imports torch.
"""
