"""One run at a time on one output: an advisory lock on the output file itself.

`run` holds it from before it looks at what the output holds until the end. The operating system gives
it back when the process ends, however it ends, so a kill leaves nothing to clean up. The output is the
one file of a run that is never replaced by another of its name, and two names (links) of one file meet
in it; a lock beside it could do neither.

Invariant: a run that wrote nothing leaves no output that was not there before.
"""

import errno
import fcntl
import logging
import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from jaxserve.cli.output_files import OutputError

_NOT_OFFERED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # by some network file systems

logger = logging.getLogger("jaxserve.cli")


class OutputLock(AbstractContextManager["OutputLock"]):
    """Locks an output while it is entered, creating the file if there is none.

    Args:
        output: a file; None locks nothing.
    """

    def __init__(self, output: Path | None):
        self._output = output
        # The end of a chain of links: what is created, and perhaps removed, is the file and not a link.
        self._path = None if output is None else Path(os.path.realpath(output))
        self._descriptor: int | None = None
        self._is_to_remove = False

    def keep(self) -> None:
        """From here on the file is an output, even an empty one, and stays."""
        self._is_to_remove = False

    def release(self) -> None:
        """Gives the lock back, and takes away a file that was only made to be locked; may be repeated."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None or self._path is None:
            return
        # Still locked here. A run that has opened the file already finds out that it is gone, and
        # makes another.
        with suppress(OSError):
            if self._is_to_remove and os.fstat(descriptor).st_size == 0:
                self._path.unlink(missing_ok=True)
        os.close(descriptor)

    def __enter__(self) -> "OutputLock":
        """Takes the lock.

        Raises:
            OutputError: another run has it, or the file cannot be opened for writing.
        """
        while self._path is not None and not self._is_locked(self._path):
            self.release()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _is_locked(self, path: Path) -> bool:
        """Opens and locks; False where the file was taken away in between, by a run that wrote nothing."""
        try:
            self._open(path)
        except OSError as error:
            raise OutputError(f"cannot write --output={self._output}: {error.strerror}") from None
        descriptor = self._descriptor
        if descriptor is None:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._is_to_remove = False  # it is the other run's
            self.release()
            raise OutputError(
                f"another run is writing {self._output}: wait for its end, or give another --output"
            ) from None
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise OutputError(f"cannot lock {self._output}: {error.strerror}") from None
            logger.warning(
                "%s cannot be locked (%s): see to it that no other run writes it",
                self._output,
                error.strerror,
            )
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(path))
        except FileNotFoundError:
            return False

    def _open(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            self._is_to_remove = True
        except FileExistsError:
            self._is_to_remove = False
            with suppress(FileNotFoundError):
                self._descriptor = os.open(path, os.O_RDWR)
