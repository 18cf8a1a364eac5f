"""How many examples the random tests draw; FUZZ_EXAMPLES in the environment changes it."""

import os

import hypothesis

# FUZZ_EXAMPLES=100000 in the environment is a long run, each with other examples
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "120"))
hypothesis.settings.register_profile("egg", max_examples=EXAMPLES, derandomize="FUZZ_EXAMPLES" not in os.environ,
                                     deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
hypothesis.settings.load_profile("egg")
SLOW = hypothesis.settings(max_examples=EXAMPLES // 3)           # for examples that talk to a coordinator, or take long
