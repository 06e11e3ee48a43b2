{{- define "epp.name" -}}
{{ .Release.Name }}-epp
{{- end }}

{{- define "epp.selector" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: epp
{{- end }}

{{- define "epp.meta" -}}
name: {{ include "epp.name" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "epp.selector" . | nindent 2 }}
  app.kubernetes.io/name: pigou-epp
  app.kubernetes.io/managed-by: {{ .Release.Service }}
  helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
