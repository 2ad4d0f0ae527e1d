"""A private folder for loadable files, with integrity checks.

Code loaded from a file runs as this user, so folder and file must belong to this user, not be writable by others, and
not be links. A digest beside each file detects truncation and damage.
"""

import fcntl
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER_VARIABLE = "GRAPHDECODE_CACHE_DIR"


def cache_folder() -> Path:
    """Return `$GRAPHDECODE_CACHE_DIR`, else `graphdecode` in `$XDG_CACHE_HOME`, else in `~/.cache`.

    Raises:
        FileNotFoundError: this user has no home.
    """
    if named := os.environ.get(FOLDER_VARIABLE):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphdecode"
    except RuntimeError as error:
        raise FileNotFoundError(f"this user has no home: {error}") from error


_LOCK = "lock"
_SCRATCH = "making-"
_POLL_SECONDS = 0.05


class PrivateFolder:
    """A private folder, created if missing.

    Args:
        path: the folder; its parents are created, too.

    Raises:
        OSError: it cannot be created or read, or is not private.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        status = os.fstat(self._folder)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            os.close(self._folder)
            raise PermissionError(
                f"belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}; "
                f"it must be of user {os.geteuid()} with mode 700"
            )

    def close(self) -> None:
        """Release the folder."""
        os.close(self._folder)

    def opened(self, name: str) -> int | None:
        """Return a descriptor of an intact file; None if it is missing or damaged.

        Raises:
            PermissionError: another user could have written the file.
        """
        try:
            descriptor = self._open(name)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise PermissionError(
                    f"{name} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}"
                )
            if self._is_whole(descriptor, name):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def holds(self, name: str) -> bool:
        """Whether a file is there and intact."""
        descriptor = self.opened(name)
        if descriptor is None:
            return False
        os.close(descriptor)
        return True

    def put(self, file_path: Path, name: str) -> None:
        """Move a finished file in; it is synced to disk before it gets its name."""
        file_path.chmod(0o700)
        digest = file_path.with_suffix(".digest")
        with file_path.open("rb") as file:
            digest.write_text(_described(file.fileno()))
            os.fsync(file.fileno())
        with digest.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(digest, f"{name}.digest", dst_dir_fd=self._folder)
        os.replace(file_path, name, dst_dir_fd=self._folder)
        os.fsync(self._folder)

    @contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        """Lock the folder against other processes.

        Raises:
            TimeoutError: the lock is held for longer than `seconds`.
        """
        lock = self._open(_LOCK, os.O_RDWR | os.O_CREAT)
        try:
            end = time.monotonic() + seconds
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() > end:
                    raise TimeoutError(f"another process has held the lock for {seconds:.0f} s")
                time.sleep(_POLL_SECONDS)
            yield
        finally:
            os.close(lock)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Return a temporary folder inside, while this one is locked; leftovers of killed processes are removed."""
        for left in self.path.glob(f"{_SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
        inside = self.path / f"{_SCRATCH}{os.getpid()}"
        inside.mkdir(mode=0o700)
        try:
            yield inside
        finally:
            shutil.rmtree(inside, ignore_errors=True)

    def _open(self, name: str, flags: int = os.O_RDONLY) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._folder)

    def _is_whole(self, descriptor: int, name: str) -> bool:
        try:
            digest = self._open(f"{name}.digest")
        except FileNotFoundError:
            return False
        try:
            return os.read(digest, 200).decode(errors="replace") == _described(descriptor)
        finally:
            os.close(digest)


def _described(descriptor: int) -> str:
    """Return size and SHA-256 of a file."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return f"{os.fstat(descriptor).st_size} {hashlib.file_digest(file, 'sha256').hexdigest()}\n"
