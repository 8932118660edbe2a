"""The paper's tables and figures, one file each, with its own values beside ours."""
