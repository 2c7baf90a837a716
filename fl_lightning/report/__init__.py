"""``fl-lightning report``: from the folders of runs to tables, figures, intervals and verdicts.

``runs`` reads folders → ``scores`` and ``intervals`` are the arithmetic → ``summary`` is what
``report.json`` holds → ``sections`` words it as tables, ``charts`` and ``curves`` draw it, ``page``
puts both on one page. Nothing here imports torch.
"""
