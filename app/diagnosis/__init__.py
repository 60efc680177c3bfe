"""Why a run failed or trains badly, and changes of options that may help."""
