from hypothesis import HealthCheck, settings

# A busy machine must not fail a test: the time limit of the session is enough.
settings.register_profile("acemq", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("acemq")
