import json
def test_a(evaluated, trained, project):
    import subprocess
    print(subprocess.run(f"find {project} -type f | xargs ls -la; cat {trained}/answers.jsonl; cat {trained}/training/metrics.jsonl; cat {evaluated}/report.md; cp -r {project} /tmp/t/project", shell=True, capture_output=True, text=True).stdout)
