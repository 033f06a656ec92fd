import pytest

from hybridmf.data import arrow_text


@pytest.fixture(autouse=True, scope="module")
def pyarrow_reads_small_files():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_text, "SMALLEST", 0)
        yield
