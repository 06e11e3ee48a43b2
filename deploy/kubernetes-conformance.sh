#!/usr/bin/env bash
# What only a real cluster shows of `pigou operator`: admission, roles, garbage collection, probes,
# scheduling, drains. NOT RUN by the project's tests, which have no cluster.
#
#   deploy/kubernetes-conformance.sh GATEWAY_IMAGE WORKER_IMAGE
#
# It needs kubectl, helm and curl, and a context that may create a namespace, definitions and
# cluster roles. The fleet runs on CPUs. It ends with the number of failed checks.
set -uo pipefail

gateway=${1:?image of the gateway} worker=${2:?image of the worker}
chart=$(dirname "$0")/helm/pigou
namespace=pigou-conformance-$RANDOM
failed=0
scratch=$(mktemp -d)

k() { kubectl --namespace "$namespace" "$@"; }
check() {
  local law=$1; shift
  if "$@" >"$scratch/log" 2>&1; then echo "ok    $law"; else
    echo "FAILS $law"; sed 's/^/      /' "$scratch/log" | tail -5; failed=$((failed + 1))
  fi
}
ready() { k wait pigoufleet/chat --for=condition=Ready --timeout="${1:-600s}"; }
replicas() {  # of all versions of a role
  k get deployments -l "pigou.dev/role=$1" -o jsonpath='{range .items[*]}{.spec.replicas}{"\n"}{end}' |
    awk '{ sum += $1 } END { print sum + 0 }'
}
versions() { k get deployments -l pigou.dev/part=worker -o jsonpath='{.items[*].metadata.labels.pigou\.dev/version}' | tr ' ' '\n' | sort -u | grep -c .; }
answers() {
  k run "ask-$RANDOM" --rm --attach --quiet --restart=Never --image=curlimages/curl -- \
    curl -sf --max-time 60 http://chat/v1/completions -H 'content-type: application/json' \
    -d '{"model":"bundled","prompt":"hello","max_tokens":8}'
}
refused() { ! "$@"; }
patch() { k patch pigoufleet chat --type=json -p "$1"; }

trap 'helm uninstall --namespace "$namespace" conformance >/dev/null 2>&1
      kubectl delete namespace "$namespace" --wait=false >/dev/null 2>&1
      rm -rf "$scratch"' EXIT

kubectl create namespace "$namespace" || exit 2
cat > "$scratch/values.yaml" <<EOF
operator: {image: $gateway}
fleet:
  name: chat
  spec:
    image: $worker
    gateway: {image: $gateway, args: [--allow-open]}
    models:
      - name: bundled
        update: {surge: 1, unavailable: 0}
        pools:
          - {role: prefill, replicas: 1, gpusPerReplica: 0, memory: 1Gi, shmSize: 256Mi}
          - {role: decode, minReplicas: 1, maxReplicas: 3, gpusPerReplica: 0, memory: 1Gi, shmSize: 256Mi}
EOF
check "the chart is installed" helm install --namespace "$namespace" conformance "$chart" \
  --values "$scratch/values.yaml"
check "the definitions are established" kubectl wait crd/pigoufleets.pigou.dev crd/pigoupools.pigou.dev \
  --for=condition=Established --timeout=60s
check "the fleet becomes ready" ready
check "it answers" answers
check "an unknown field is refused" refused patch '[{"op":"add","path":"/spec/unknown","value":1}]'
check "an unknown role is refused" refused patch \
  '[{"op":"replace","path":"/spec/models/0/pools/0/role","value":"draft"}]'
check "the pool is scaled by its scale subresource" k scale pigoupool/chat-bundled-decode --replicas=2
sleep 5
check "it is ready with two decode workers" ready
check "two decode workers are asked for" test "$(replicas decode)" = 2
check "a selector is shown to autoscalers" k get --raw \
  "/apis/pigou.dev/v1alpha1/namespaces/$namespace/pigoupools/chat-bundled-decode/scale"
check "another version is rolled out" patch \
  '[{"op":"add","path":"/spec/models/0/pools/0/args","value":["--max-seqs","8"]}]'
sleep 2
check "it answers in mid-roll" answers
check "the new version is ready" ready 1200s
check "one version is left" test "$(versions)" = 1
check "it answers afterwards" answers
check "a version that never starts is not called ready" patch \
  '[{"op":"replace","path":"/spec/models/0/pools/0/args","value":["--no-such-option"]}]'
sleep 30
check "the serving version is whole meanwhile" test "$(replicas decode)" -ge 2
check "it answers meanwhile" answers
check "it is reverted in mid-roll" patch \
  '[{"op":"replace","path":"/spec/models/0/pools/0/args","value":["--max-seqs","8"]}]'
check "it is ready again" ready 1200s
check "the broken version is gone" test "$(versions)" = 1
check "a pod ends within its drain" k delete pod -l pigou.dev/role=prefill --timeout=150s
check "its successor is ready" ready
check "the fleet is deleted" k delete pigoufleet chat --timeout=120s
sleep 60
check "what it owned is collected" test "$(k get deployments -l pigou.dev/fleet=chat -o name | wc -l)" = 0
echo "$failed checks failed"
exit "$((failed > 0))"
