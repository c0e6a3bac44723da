"""PostgreSQL and MariaDB servers of one's own. Everybody on this machine may log in: they hold only test data."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from tests.services.docker import DockerServer
from tests.services.server import LOOPBACK, CannotBeHad, Identity, LocalServer, Server, free_ports, install, nearest


class Database(Server):
    """A database server; `url` names its first database, which tests may share."""

    @abstractmethod
    def url_of(self, database: str) -> str: ...

    @abstractmethod
    def execute(self, statement: str, database: str | None = None) -> str:
        """Run one statement by the server's own client, as its superuser; rows as lines, columns parted by tabs."""

    @abstractmethod
    def create_database(self, name: str) -> str:
        """A new, empty database; its URL. Rows of other tests are not seen there and not waited for."""

    def drop_database(self, name: str) -> None:
        self.execute(f"DROP DATABASE {self._quoted(name)}")

    @property
    def url(self) -> str:
        return self.url_of(self._first_database)

    _first_database: ClassVar[str]

    @abstractmethod
    def _quoted(self, name: str) -> str: ...


class PostgreSQL(Database):
    """A PostgreSQL server, superuser `test` without a password."""

    _first_database = "postgres"

    @classmethod
    def obtain(cls, **settings: str) -> PostgreSQL:
        """A server, not yet started, by the nearest route; `settings` as in `postgresql.conf`."""

        def installed() -> PostgreSQL:
            install("postgresql")
            return LocalPostgreSQL(settings)

        return nearest("PostgreSQL", lambda: LocalPostgreSQL(settings), lambda: DockerPostgreSQL(settings), installed)

    def create_database(self, name: str) -> str:
        self.execute(f"CREATE DATABASE {self._quoted(name)}")
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        self.execute(f"DROP DATABASE {self._quoted(name)} WITH (FORCE)")

    def _quoted(self, name: str) -> str:
        return f'"{name}"'


class MariaDB(Database):
    """A MariaDB server, user `root` without a password."""

    _first_database = "test"

    @classmethod
    def obtain(cls, **settings: str) -> MariaDB:
        """A server, not yet started, by the nearest route; `settings` as options of `mariadbd`."""

        def installed() -> MariaDB:
            install("mariadb-server")
            return LocalMariaDB(settings)

        return nearest("MariaDB", lambda: LocalMariaDB(settings), lambda: DockerMariaDB(settings), installed)

    def create_database(self, name: str) -> str:
        self.execute(f"CREATE DATABASE IF NOT EXISTS {self._quoted(name)} CHARACTER SET utf8mb4")
        return self.url_of(name)

    def _quoted(self, name: str) -> str:
        return f"`{name}`"


class LocalDatabase(LocalServer, Database):
    """From the binaries of this machine, on a data folder made at the first start."""

    runs_as: ClassVar[str]
    """The user that the server wants in place of root."""

    def __init__(self, settings: dict[str, str]) -> None:
        super().__init__()
        (self.port,) = free_ports(1)
        self._settings = settings
        self.data = self.home / "data"
        if os.geteuid() == 0:
            self.data.mkdir()
            for folder in (self.home, self.data):
                shutil.chown(folder, self.runs_as, self.runs_as)

    def start(self) -> None:
        if not (self.home / "made").exists():
            self._run(self._initialise())
            (self.home / "made").touch()
        super().start()

    @abstractmethod
    def _initialise(self) -> list[str]:
        """The command that makes the data folder."""

    @abstractmethod
    def _client(self, *arguments: str) -> list[str]:
        """A command of the server's own client."""

    def _identity(self) -> Identity:
        if os.geteuid() != 0:
            return {}
        return {"user": self.runs_as, "group": self.runs_as, "extra_groups": []}

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(
            command,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            **self._identity(),
        )
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr or done.stdout}")
        return done.stdout


class LocalPostgreSQL(LocalDatabase, PostgreSQL):
    runs_as = "postgres"
    stop_signal = signal.SIGINT  # SIGTERM waits for every client to leave

    def __init__(self, settings: dict[str, str]) -> None:
        self._binaries = _folder_of("postgres", *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))
        super().__init__(settings)

    def url_of(self, database: str) -> str:
        return f"postgresql://test@{LOOPBACK}:{self.port}/{database}"

    def execute(self, statement: str, database: str | None = None) -> str:
        return self._run(self._client("-d", database or self._first_database, "-c", statement))

    def _initialise(self) -> list[str]:
        made_by = str(self._binaries / "initdb")
        return [
            made_by,
            "-D",
            str(self.data),
            "-U",
            "test",
            "-A",
            "trust",
            "--no-sync",
            "-E",
            "UTF8",
            "--locale=C.UTF-8",
        ]

    def _command(self) -> list[str]:
        settings = {"listen_addresses": LOOPBACK, "unix_socket_directories": str(self.home)} | self._settings
        options = [option for name, value in settings.items() for option in ("-c", f"{name}={value}")]
        return [str(self._binaries / "postgres"), "-D", str(self.data), "-p", str(self.port), *options]

    def _answers(self) -> bool:
        look = [str(self._binaries / "pg_isready"), "-q", "-h", LOOPBACK, "-p", str(self.port), "-U", "test"]
        return subprocess.run(look, check=False).returncode == 0

    def _client(self, *arguments: str) -> list[str]:
        where = ["-h", LOOPBACK, "-p", str(self.port), "-U", "test"]
        return [str(self._binaries / "psql"), "-XAtq", "-F", "\t", "-v", "ON_ERROR_STOP=1", *where, *arguments]


class LocalMariaDB(LocalDatabase, MariaDB):
    runs_as = "mysql"

    def __init__(self, settings: dict[str, str]) -> None:
        self._server = _folder_of("mariadbd", Path("/usr/sbin")) / "mariadbd"
        super().__init__(settings)

    def url_of(self, database: str) -> str:
        return f"mariadb://root@{LOOPBACK}:{self.port}/{database}"

    def execute(self, statement: str, database: str | None = None) -> str:
        return self._run(self._client(*(["-D", database] if database else []), "-e", statement))

    def start(self) -> None:
        super().start()
        self.create_database(self._first_database)

    def _initialise(self) -> list[str]:
        return [
            "mariadb-install-db",
            "--no-defaults",
            f"--datadir={self.data}",
            f"--tmpdir={self.home}",  # a server removes the temporary tables of all others in the folder as it starts
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
        ]

    def _command(self) -> list[str]:
        return [
            str(self._server),
            "--no-defaults",
            f"--datadir={self.data}",
            f"--tmpdir={self.home}",
            f"--port={self.port}",
            f"--bind-address={LOOPBACK}",
            f"--socket={self.home / 's.sock'}",
            f"--pid-file={self.home / 'pid'}",
            "--skip-name-resolve",
            "--innodb-buffer-pool-size=128M",
            *(f"--{name.replace('_', '-')}={value}" for name, value in self._settings.items()),
        ]

    def _answers(self) -> bool:
        look = ["mariadb-admin", "--no-defaults", "-h", LOOPBACK, "-P", str(self.port), "-u", "root", "ping"]
        return subprocess.run(look, capture_output=True, check=False).returncode == 0

    def _client(self, *arguments: str) -> list[str]:
        where = ["-h", LOOPBACK, "-P", str(self.port), "-u", "root"]
        return ["mariadb", "--no-defaults", "--batch", "--skip-column-names", *where, *arguments]


class DockerPostgreSQL(DockerServer, PostgreSQL):
    image = "postgres:15"
    listens_on = 5432
    environment = {"POSTGRES_USER": "test", "POSTGRES_HOST_AUTH_METHOD": "trust", "POSTGRES_DB": "postgres"}  # noqa: RUF012

    def __init__(self, settings: dict[str, str]) -> None:
        super().__init__()
        options = [option for name, value in settings.items() for option in ("-c", f"{name}={value}")]
        self._container.with_command(["postgres", *options])

    def url_of(self, database: str) -> str:
        return f"postgresql://test@{self._host}:{self.port}/{database}"

    def execute(self, statement: str, database: str | None = None) -> str:
        where = ("-U", "test", "-d", database or self._first_database)
        return self.demand("psql", "-XAtq", "-F", "\t", "-v", "ON_ERROR_STOP=1", *where, "-c", statement)

    def _answers(self) -> bool:
        code, _ = self.run("pg_isready", "-q", "-h", LOOPBACK, "-U", "test")
        return code == 0


class DockerMariaDB(DockerServer, MariaDB):
    image = "mariadb:10.11"
    listens_on = 3306
    environment = {"MARIADB_ALLOW_EMPTY_ROOT_PASSWORD": "1", "MARIADB_DATABASE": "test"}  # noqa: RUF012

    def __init__(self, settings: dict[str, str]) -> None:
        super().__init__()
        options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        self._container.with_command(["mariadbd", *options])

    def url_of(self, database: str) -> str:
        return f"mariadb://root@{self._host}:{self.port}/{database}"

    def execute(self, statement: str, database: str | None = None) -> str:
        where = ("-u", "root", *(["-D", database] if database else []))
        return self.demand("mariadb", "--batch", "--skip-column-names", *where, "-e", statement)

    def _answers(self) -> bool:
        code, _ = self.run("mariadb-admin", "-h", LOOPBACK, "-u", "root", "ping")
        return code == 0


def _folder_of(program: str, *elsewhere: Path) -> Path:
    """Where a server and its helpers lie: Debian keeps them off the PATH."""
    for folder in elsewhere:
        if (folder / program).exists():
            return folder
    found = shutil.which(program)
    if found is None:
        raise CannotBeHad(f"no {program} on this machine")
    return Path(found).resolve().parent
