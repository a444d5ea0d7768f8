"""What each Bazel test target runs: pytest on the files it is given."""

import sys

import pytest

sys.exit(pytest.main(['-p', 'no:cacheprovider', *sys.argv[1:]]))
