from noise_cases import backend  # noqa: F401 (a fixture of all tests here)
