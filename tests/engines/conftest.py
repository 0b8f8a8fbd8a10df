from tests.server.conftest import flags, fleet  # noqa: F401 - fixtures
