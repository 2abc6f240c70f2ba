"""A command, by default train, whose ranks miss each other after seconds instead of minutes."""

import os

from lezo_ds.__main__ import main
from lezo_ds.distributed import heartbeat

if __name__ == "__main__":
    heartbeat.LIMIT_SECONDS = float(os.environ.get("LIMIT_SECONDS", "6"))
    heartbeat._JOINING_SECONDS = heartbeat._NOTICE_SECONDS = 2.0
    main(os.environ.get("COMMAND", "train"))
