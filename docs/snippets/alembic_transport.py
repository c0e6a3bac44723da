import tempfile

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import MetaData, create_engine

from acemq.transports.sql import schema

with tempfile.TemporaryDirectory() as folder:
    engine = create_engine(f"sqlite:///{folder}/shop.db")

    # env.py: without them autogenerate would drop what it does not know
    metadata = MetaData()
    schema.tables(metadata, "sqlite")

    with engine.begin() as connection:
        context = MigrationContext.configure(connection)
        op = Operations(context)

        # versions/0003_messages.py
        def upgrade() -> None:
            for statement in schema.sql("sqlite").split(";\n"):
                if statement.strip():
                    op.execute(statement)

        upgrade()
        print("left to do:", compare_metadata(context, metadata))
    engine.dispose()
