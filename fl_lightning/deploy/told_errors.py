"""Reports an error of a site to the server without cells, labels, columns' names and folders.

The text of an error may quote what it is about. So only texts that this package makes without the
site's data leave it: those about messages, states, and the journal of rows. Of every other error
its kind leaves, and where it was raised; the text is in the site's own log.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from fl_lightning.deploy.transport import visible
from fl_lightning.errors import CellError, OtherNames, UserError

LOG = "site.log"
TOLD = "site.told"  # file with what the server is told of the error that ended a site's process
# Modules whose errors hold nothing of a site's samples, and one that quotes the site's file.
_OF_MESSAGES = ("fl_lightning.deploy.", "fl_lightning.aggregation.metric_states")
_OF_FILE = "fl_lightning.deploy.flower.serve_site"
# From the first slash to the last of a line: names of folders may have blanks.
_FOLDERS = re.compile(r"(?<![\w.])/[^\n]*/")
MOST = 1000  # characters
LOGGED = 10_000  # characters of an error in the site's own log


def told(error: BaseException) -> str:
    """Return what the server may know of an error at a site."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    if not frames:
        return f"{type(error).__name__}; the text is in the site's {LOG}"
    frame, line = frames[-1]
    module = str(frame.f_globals.get("__name__", ""))
    if isinstance(error, OtherNames):
        return visible(error.told, MOST)
    of_messages = module.startswith(_OF_MESSAGES) and module != _OF_FILE
    if isinstance(error, UserError) and of_messages:
        return visible(_FOLDERS.sub("…/", str(error)), MOST)
    place = f"{Path(frame.f_code.co_filename).name}, line {line}"
    if isinstance(error, CellError) and error.place:
        place = f"the site's data, {error.place}"
    return visible(f"{type(error).__name__} in {place}; the text is in the site's {LOG}", MOST)
