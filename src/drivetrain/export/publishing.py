"""Uploads a verified export to a hub of models.

The hub is Hugging Face's, or the one that HF_ENDPOINT names. huggingface_hub, which comes with Transformers, carries
the files; the token is the one of `hf auth login` or HF_TOKEN, and is written nowhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from drivetrain.errors import RunError, problem

FIELD = "--push"


class Hub:
    """A repository of models, at which this process may write."""

    def __init__(self, repository: str, public: bool = False) -> None:
        """repository: OWNER/NAME. public: whether a repository that is made is visible to all.

        Raises UserError for a name that is none, without a token, and if the hub does not answer or refuses the token.
        """
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
        from huggingface_hub.utils import validate_repo_id

        self.repository, self._public = repository, public
        if repository.count("/") != 1:
            raise problem(FIELD, f"{repository} was given", "give OWNER/NAME, a repository of yours on the hub")
        try:
            validate_repo_id(repository)
        except HFValidationError as error:
            raise problem(FIELD, f"{repository} is no repository's name: {error}", "give OWNER/NAME") from None
        if os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", ""):
            raise problem(FIELD, "HF_HUB_OFFLINE forbids to ask a hub", "unset it, or leave --push out")
        if get_token() is None:
            raise problem(FIELD, "there is no token of the hub", "run `hf auth login`, or set HF_TOKEN")
        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        try:
            self._api.whoami()
        except HfHubHTTPError as error:
            why = f"{self._api.endpoint} refuses the token ({_status(error)})"
            raise problem(FIELD, why, "run `hf auth login` again, with a token that may write") from None
        except Exception as error:  # of whatever carries the request
            why = f"{self._api.endpoint} does not answer: {type(error).__name__}"
            raise problem(FIELD, why, "look at the network and HF_ENDPOINT, or leave --push out") from None

    def upload(self, folder: Path) -> str:
        """Uploads all files of the folder as one commit; returns the repository's address.

        Raises RunError if the hub refuses; the folder stays.
        """
        from huggingface_hub.errors import HfHubHTTPError

        try:
            self._api.create_repo(self.repository, private=not self._public, exist_ok=True)
            self._api.upload_folder(
                repo_id=self.repository, folder_path=folder, commit_message="Export verified by drivetrain"
            )
        except Exception as error:
            why = _status(error) if isinstance(error, HfHubHTTPError) else f"{type(error).__name__}: {error}"
            raise RunError(
                f"the export is verified and lies in {folder}, but {self._api.endpoint} did not take it: {why}\n"
                f"  correct that, then: hf upload {self.repository} {folder}"
            ) from None
        return f"{self._api.endpoint}/{self.repository}"


def _status(error: Any) -> str:
    answered = error.response
    return f"{answered.status_code} {getattr(answered, 'reason_phrase', '')}".strip()
