#!/usr/bin/env bash
# What only a real cluster shows of `pigou operator`: admission, roles, garbage collection, probes,
# scheduling, drains. NOT RUN by the project's tests, which have no cluster.
#
#   deploy/kubernetes-conformance.sh GATEWAY_IMAGE WORKER_IMAGE
#
# It needs kubectl, helm and curl, and a context that may create a namespace, definitions and
# cluster roles. The fleet runs on CPUs. It ends with the number of failed checks.
# Where the Gateway API Inference Extension is installed, the endpoint picker is checked too; with
# GATEWAY_CLASS=NAME also through a gateway of that class.
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

# The endpoint picker, before workers that are open to the cluster.
endpoints() {
  k exec deploy/pick-epp -- python -c "import json, urllib.request as u
print(sum(row['state'] == 'up' for row in json.load(u.urlopen('http://127.0.0.1:9090/workers'))['workers']))"
}
becomes() { for _ in $(seq 60); do test "$(endpoints)" = "$1" && return; sleep 2; done; return 1; }
through() {
  k run "ask-$RANDOM" --rm --attach --quiet --restart=Never --image=curlimages/curl -- \
    curl -sfi --max-time 60 "http://$address/v1/completions" -H 'content-type: application/json' \
    -d '{"model":"bundled","prompt":"hello","max_tokens":8,"stream":true}' | grep -q 'data: \[DONE\]'
}
if kubectl get crd inferencepools.inference.networking.k8s.io >/dev/null 2>&1; then
  k create deployment open --image="$worker" --replicas=2 -- \
    pigou worker --host 0.0.0.0 --port 8000 --allow-open --log-format json
  k patch deployment open --type=json -p '[{"op":"add","path":"/spec/template/spec/containers/0/readinessProbe",
    "value":{"httpGet":{"path":"/health","port":8000}}}]'
  check "the chart of the picker is installed" helm install --namespace "$namespace" pick \
    "$(dirname "$0")/helm/pigou-epp" --set "image=$gateway,pool.name=open,pool.matchLabels.app=open"
  check "the picker is ready" k rollout status deployment/pick-epp --timeout=300s
  check "it has the pods of its pool" becomes 2
  check "the pool is scaled" k scale deployment/open --replicas=3
  check "it has the new pod" becomes 3
  check "the pool shrinks" k scale deployment/open --replicas=1
  check "it has the pod that is left" becomes 1
  if [ -n "${GATEWAY_CLASS:-}" ]; then
    k apply -f - <<EOF
{apiVersion: gateway.networking.k8s.io/v1, kind: Gateway, metadata: {name: open}, spec: {
  gatewayClassName: $GATEWAY_CLASS, listeners: [{name: http, port: 80, protocol: HTTP}]}}
---
{apiVersion: gateway.networking.k8s.io/v1, kind: HTTPRoute, metadata: {name: open}, spec: {
  parentRefs: [{name: open}], rules: [{backendRefs: [
    {group: inference.networking.k8s.io, kind: InferencePool, name: open}]}]}}
EOF
    check "the gateway is programmed" k wait gateway/open --for=condition=Programmed --timeout=300s
    address=$(k get gateway open -o jsonpath='{.status.addresses[0].value}')
    check "a stream passes the gateway" through
    k scale deployment/pick-epp --replicas=0 && k wait pod -l app.kubernetes.io/component=epp --for=delete --timeout=120s
    check "without a picker the gateway refuses (FailClose)" refused through
  fi
  helm uninstall --namespace "$namespace" pick >/dev/null 2>&1
else
  echo "skip  the endpoint picker: there is no definition of InferencePool"
fi
echo "$failed checks failed"
exit "$((failed > 0))"
