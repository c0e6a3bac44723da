import tempfile

from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import MetaData, create_engine, inspect

from acemq import DbIdempotencyStore, DbOutboxStore

with tempfile.TemporaryDirectory() as folder:
    engine = create_engine(f"sqlite:///{folder}/shop.db")

    # env.py: what autogenerate compares the database with
    metadata = MetaData()
    DbOutboxStore(engine).table(metadata)
    DbIdempotencyStore(engine).table(metadata)

    # versions/0002_messages.py: or a revision written by hand, from the text
    with engine.begin() as connection:
        op = Operations(MigrationContext.configure(connection))

        def upgrade() -> None:
            for store in (DbOutboxStore(engine), DbIdempotencyStore(engine)):
                for statement in store.create_table_sql().split(";\n"):
                    if statement.strip():
                        op.execute(statement)

        upgrade()

    print(sorted(inspect(engine).get_table_names()))
    print("as described:", set(metadata.tables) == set(inspect(engine).get_table_names()))
    engine.dispose()
