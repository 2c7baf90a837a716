"""The fixtures of the library's tests; `make test-studies` runs the tests here."""

pytest_plugins = ["tests.conftest"]
